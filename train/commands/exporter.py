"""`train exporter`: figures of runs and GPUs for Prometheus, over HTTP."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from train.commands.parser import Parser, number
from train.errors import Refused

_PORT = "9477"
_MOST_RECENT = 1000
"""Each run is some thirty series more."""


def add_arguments(parser: Parser) -> None:
    """Where it listens, and of how many runs it tells."""
    text = "where it listens; 0.0.0.0 is every way into this machine, and asks nobody who they are (127.0.0.1)"
    parser.add_argument("--address", default="127.0.0.1", help=text)
    parser.add_argument("--port", default=_PORT, help=f"({_PORT})")
    text = "runs that have ended well, of which it tells: the last so many (20)"
    parser.add_argument("--recent", metavar="N", default="20", help=text)


def run(options: Namespace, runs: Path) -> int:
    """Serve until it is stopped."""
    port = number("port", options.port, 1, 65535) or int(_PORT)
    recent = number("recent", options.recent, most=_MOST_RECENT) or 0
    if not options.address:
        raise Refused("--address is empty; 127.0.0.1 is this machine alone")
    from train.monitor.prometheus import serve

    serve(runs, options.address, port, recent)

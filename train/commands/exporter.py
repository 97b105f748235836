"""`train exporter`: serve metrics of runs and GPUs to Prometheus over HTTP."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from ..errors import Refused
from .parser import Parser, number

_PORT = "9477"
_MOST_RECENT = 1000
"""Maximum of --recent. Each run adds about thirty series."""


EXAMPLES = {
    "train exporter": "Serve the metrics at http://127.0.0.1:9477/metrics until Ctrl-C.",
    "train exporter --address 0.0.0.0 --port 9400": "Let other machines read them, too. There is no password.",
}


def add_arguments(parser: Parser) -> None:
    """Add the address, the port and the number of ended runs."""
    text = f"Port to listen on. Default: {_PORT}."
    parser.add_argument("--port", default=_PORT, help=text)
    text = "Address to listen on. 0.0.0.0: all networks of this machine, without a password. Default: 127.0.0.1."
    parser.add_argument("--address", default="127.0.0.1", help=text)
    text = "Number of runs that have ended well whose metrics are still served. Default: 20."
    parser.add_argument("--recent", metavar="N", default="20", help=text)


def run(options: Namespace, runs: Path) -> int:
    """Serve until a signal ends this process."""
    port = number("port", options.port, 1, 65535) or int(_PORT)
    recent = number("recent", options.recent, most=_MOST_RECENT) or 0
    if not options.address:
        raise Refused("--address is empty; give 127.0.0.1 for this machine only")
    from ..monitor.prometheus import serve

    serve(runs, address=options.address, port=port, recent=recent)

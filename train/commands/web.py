"""`train web`: show the runs in a browser."""

from __future__ import annotations

from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

from ..errors import EXIT_FINISHED, Refused
from .parser import Parser, number

_PORT = 8890
EXAMPLES = {
    "train web": "Print an address for the browser, and serve the page until Ctrl-C.",
    "train web --port 9000": "On another port. In the station the page is there already: make url",
}


def add_arguments(parser: Parser) -> None:
    """Add the port."""
    parser.add_argument("--port", help=f"Port of 127.0.0.1 to listen on. Default: {_PORT}.")


def run(options: Namespace, runs: Path) -> int:
    """Serve until a signal ends this process."""
    port = number("port", options.port, 1, 65535) or _PORT
    if find_spec("jupyter_server") is None:
        raise Refused("train web needs jupyter-server: pip install jupyter-server")
    from ..web.alone import serve

    serve(runs, port)
    return EXIT_FINISHED

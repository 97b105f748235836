"""`train logs`: print the output of a rank."""

from __future__ import annotations

import io
from argparse import Namespace
from pathlib import Path
from typing import TextIO

from .completion_values import words
from .options import add_name
from .parser import Parser, number

EXAMPLES = {
    "train logs demo1": "Print what rank 0 wrote in the last attempt.",
    "train logs demo1 --follow": "Print it, and what is written until the run ends.",
    "train logs demo1 --rank 1 --attempt all": "Print the output of rank 1 in all attempts.",
}


def add_arguments(parser: Parser) -> None:
    """Add the run, the rank and the attempt."""
    add = parser.add_argument
    add_name(parser)
    add("--follow", action="store_true", help="Continue until the run ends, then exit with its code.")
    add("--rank", metavar="R", help="Number of the rank. Default: 0.")
    add("--attempt", metavar="N|all", help="Number of the attempt. Default: the last one.", offer=words("all"))


def run(options: Namespace, runs: Path) -> int:
    """Print the output; with --follow until the run ends, with its exit code."""
    return _print(options, runs)


def text(options: Namespace, runs: Path) -> str:
    """Return the output, for Python."""
    stream = io.TextIOWrapper(io.BytesIO(), "utf-8", "replace", write_through=True)
    _print(options, runs, stream)
    stream.seek(0)
    return stream.read()


def _print(options: Namespace, runs: Path, stream: TextIO | None = None) -> int:
    from ..run import folders
    from ..views.logs import ALL, print_log

    rank = number("rank", options.rank) or 0
    attempt = ALL if options.attempt == "all" else number("attempt", options.attempt, 1)
    run = folders.find(runs, options.name)
    return print_log(run, rank=rank, attempt=attempt, go_on=options.follow, stream=stream)

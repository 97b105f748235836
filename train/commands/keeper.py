"""`train keeper`: the service that resumes interrupted runs."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from .parser import Parser

EXAMPLES = {
    "train keeper": "Resume interrupted runs until Ctrl-C, which saves and stops all runs.",
    "train keeper --once": "Resume what was interrupted, then exit.",
}


def add_arguments(parser: Parser) -> None:
    """Add --once."""
    parser.add_argument("--once", action="store_true", help="Resume what was interrupted, then exit.")


def run(options: Namespace, runs: Path) -> int:
    """Look after the runs in this folder."""
    from ..launcher.keeper import keep

    return keep(runs, options.once)

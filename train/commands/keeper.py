"""`train keeper`: the service that keeps runs alive."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from train.commands.parser import Parser


def add_arguments(parser: Parser) -> None:
    """For how long."""
    parser.add_argument("--once", action="store_true", help="resume what was interrupted, then exit")


def run(options: Namespace, runs: Path) -> int:
    """Keep the runs of this folder."""
    from train.launcher.keeper import keep

    return keep(runs, options.once)

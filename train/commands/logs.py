"""`train logs`: what a rank printed."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from train.commands.completion_values import words
from train.commands.options import add_name
from train.commands.parser import Parser, number


def add_arguments(parser: Parser) -> None:
    """Of which run, rank and attempt."""
    add = parser.add_argument
    add_name(parser)
    add("--rank", metavar="R", help="which rank (0)")
    add("--attempt", metavar="N|all", help="which attempt; default: the last", offer=words("all"))
    add("--follow", action="store_true", help="go on until the run ends")


def run(options: Namespace, runs: Path) -> int:
    """Print it; with --follow until the run ends, and end as it does."""
    from train.run import folders
    from train.views.logs import ALL, print_log

    rank = number("rank", options.rank) or 0
    attempt = ALL if options.attempt == "all" else number("attempt", options.attempt, 1)
    return print_log(folders.find(runs, options.name), rank, attempt, options.follow)

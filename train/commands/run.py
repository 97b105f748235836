"""`train run`: train here and now."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from train.commands.options import add_task, check_now, request_of
from train.commands.parser import Parser, number
from train.launcher.ranks_and_gpus import MOST_RANKS
from train.parallel.rank_env import is_under_torchrun


def add_arguments(parser: Parser) -> None:
    """A task, its fields, and how many ranks."""
    parser.takes_fields = True
    add_task(parser)
    parser.add_argument("--spawn", metavar="N", help="start N ranks on this machine")


def run(options: Namespace, runs: Path) -> int:
    """Train until the end, or until asked to stop."""
    request, spawn = request_of(options), number("spawn", options.spawn, 1, MOST_RANKS)
    if options.name is not None and not is_under_torchrun():
        from train.run import folders

        folders.check_free(runs, options.name)
    check_now(request, runs)
    from train.launcher import foreground

    return foreground.run(runs, options.name, request, spawn)

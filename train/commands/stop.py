"""`train stop`: end a run without losing a step."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from train import screen
from train.commands.options import add_name
from train.commands.parser import Parser


def add_arguments(parser: Parser) -> None:
    """Which run, and how."""
    add_name(parser)
    parser.add_argument("--now", action="store_true", help="do not save; the last checkpoint stays")


def run(options: Namespace, runs: Path) -> int:
    """Wait until it has stopped; say how it stands."""
    from train.cluster import jobs
    from train.launcher import stopping
    from train.run import folders

    run = folders.find(runs, options.name)
    is_job = jobs.is_submitted(run.read())
    code, text = jobs.stop(run, options.now, screen.remark) if is_job else stopping.stop(run, options.now)
    screen.say(text)
    return code

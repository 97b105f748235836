"""`train rm`: delete run folders."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from train import screen
from train.commands.options import add_names, tell
from train.commands.parser import Parser
from train.errors import EXIT_FINISHED


def add_arguments(parser: Parser) -> None:
    """Which runs."""
    add_names(parser, "+")


def run(options: Namespace, runs: Path) -> int:
    """Delete all of them, or none where one is alive."""
    from train.commands import select

    found = select.matching(runs, options.names)
    for line in select.remove(found):
        tell(line)
    if any(map(select.is_pattern, options.names)):  # which ones that were is not in the command
        screen.say(f"removed {', '.join(run.name for run in found)}")
    return EXIT_FINISHED

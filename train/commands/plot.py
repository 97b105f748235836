"""`train plot`: the curves of runs."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from train import screen
from train.commands.options import add_names, add_target, matching
from train.commands.parser import Parser
from train.errors import EXIT_FINISHED


def add_arguments(parser: Parser) -> None:
    """Of which runs, and where to."""
    add_names(parser, "+")
    add_target(parser, ".png", ".svg", ".pdf")


def run(options: Namespace, runs: Path) -> int:
    """Draw them into one file."""
    from train.views.plot import plot, verdict

    chosen = matching(runs, options.names)
    plot(chosen, Path(options.to))
    for run in chosen:
        if said := verdict(run):
            screen.say(f"{run.name}: {said}")
    screen.say(f"wrote {options.to}")
    return EXIT_FINISHED

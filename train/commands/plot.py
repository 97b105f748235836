"""`train plot`: draw the curves of runs."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from .. import screen
from ..errors import EXIT_FINISHED
from .options import add_names, add_target, matching
from .parser import Parser

EXAMPLES = {
    "train plot demo1 --to demo1.png": "Draw one run.",
    "train plot 'exp-*' --to exp.svg": "Draw several runs together. The legend names the fields that differ.",
}


def add_arguments(parser: Parser) -> None:
    """Add the runs and the file."""
    add_names(parser, "+")
    add_target(parser, ".png", ".svg", ".pdf")


def run(options: Namespace, runs: Path) -> int:
    """Draw all runs into one file."""
    from ..views.plot import plot

    chosen = matching(runs, options.names)
    for run, advice in zip(chosen, plot(chosen, Path(options.to)), strict=True):
        if advice:
            screen.say(f"{run.name}: {advice}")
    screen.say(f"wrote {options.to}")
    return EXIT_FINISHED

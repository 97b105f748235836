"""`train plot`: draw the curves of runs."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from .. import screen
from ..errors import EXIT_FINISHED
from ..sweeps.kept import own_runs
from .options import add_names, add_target, matching
from .parser import Parser

EXAMPLES = {
    "train plot demo1 --to demo1.png": "Draw one run.",
    "train plot lr --to lr.png": "Draw all trials of a sweep.",
    "train plot lr --by optim.lr --to lr.png": "Draw the mean over all other fields.",
    "train plot 'exp-*' --to exp.svg": "Draw several runs together. The legend names the fields that differ.",
}


def add_arguments(parser: Parser) -> None:
    """Add the runs and the file."""
    add_names(parser, "+")
    text = "Draw the mean and the deviation of runs with equal values of these fields, with commas."
    parser.add_argument("--by", metavar="FIELDS", help=text)
    add_target(parser, ".png", ".svg", ".pdf")


def run(options: Namespace, runs: Path) -> int:
    """Draw all runs into one file."""
    from ..views.plot import plot

    chosen = [one for run in matching(runs, options.names) for one in own_runs(run) or [run]]
    by = [*map(str.strip, options.by.split(","))] if options.by is not None else []
    for run, advice in zip(chosen, plot(chosen, Path(options.to), by), strict=True):
        if advice:
            screen.say(f"{run.name}: {advice}")
    screen.say(f"wrote {options.to}")
    return EXIT_FINISHED

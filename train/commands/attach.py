"""`train attach`: open the tmux session of a run."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from ..errors import EXIT_FINISHED
from .options import add_name
from .parser import Parser

EXAMPLES = {
    "train attach demo1": "Watch the run in its own terminal. Ctrl-b d leaves; the run continues.",
}


def add_arguments(parser: Parser) -> None:
    """Add the run."""
    add_name(parser)


def run(options: Namespace, runs: Path) -> int:
    """Replace this process by a tmux client of the run."""
    from ..launcher.tmux import attach
    from ..run import folders

    attach(folders.find(runs, options.name))
    return EXIT_FINISHED

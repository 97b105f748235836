"""`train attach`: the terminal in which a run lives."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from train.commands.options import add_name
from train.commands.parser import Parser
from train.errors import EXIT_FINISHED


def add_arguments(parser: Parser) -> None:
    """Which run."""
    add_name(parser)


def run(options: Namespace, runs: Path) -> int:
    """Become that terminal."""
    from train.launcher.tmux import attach
    from train.run import folders

    attach(folders.find(runs, options.name))
    return EXIT_FINISHED

"""`train mirror`: copy what the mirror of a run lacks."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from .. import screen
from ..errors import EXIT_FINISHED, Refused
from .options import add_name
from .parser import Parser

EXAMPLES = {
    "train mirror demo1": "Copy what the mirror lacks, for example after a reboot. A running run does so by itself.",
}


def add_arguments(parser: Parser) -> None:
    """Add the run."""
    add_name(parser)


def run(options: Namespace, runs: Path) -> int:
    """Copy what is missing, and say how far the mirror is."""
    from ..mirror import process, state
    from ..run import folders

    found = folders.find(runs, options.name).held()
    found.read()  # refuses a run that this version cannot copy
    if not (url := process.url_of(found)):
        raise Refused(f"{found.name} has no mirror; give it one: train resume {found.name} --checkpoint.mirror URL")
    process.complete(found)
    screen.say(state.text(found, found.read_effective(), url))
    return EXIT_FINISHED

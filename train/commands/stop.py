"""`train stop`: save a run, then stop it."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from .. import screen
from ..errors import EXIT_FINISHED
from .options import add_name
from .parser import Parser

EXAMPLES = {
    "train stop demo1": "Save, then stop. A script gets SIGTERM, and must save by itself.",
    "train stop demo1 --now": "End the run at once. The steps since the last checkpoint are lost.",
}


def add_arguments(parser: Parser) -> None:
    """Add the run, and --now."""
    add_name(parser)
    parser.add_argument("--now", action="store_true", help="Do not save. Steps since the last checkpoint are lost.")


def run(options: Namespace, runs: Path) -> int:
    """Stop the run, wait until it has ended, and print its state."""
    from ..cluster import jobs
    from ..launcher import stopping, tmux
    from ..monitor.status import here
    from ..run import folders

    if tmux.end_check(runs, options.name) and not folders.record_of(runs, options.name):
        screen.say(f"{options.name}: its launch was ended while it was being checked; there is nothing to resume")
        return EXIT_FINISHED
    one = here(folders.find(runs, options.name))
    if jobs.is_submitted(one.record):
        code, text = jobs.stop(one.run, options.now, screen.remark)
    else:
        code, text = stopping.stop(one.run, one.program, now=options.now)
        if one.program.launches_trials:  # its loop has stopped them, unless it was killed
            from ..launcher.sweep import stop_trials

            stop_trials(one.run, now=options.now)
    screen.say(text)
    return code

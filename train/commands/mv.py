"""`train mv`: rename a run."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from .. import screen
from ..errors import EXIT_FINISHED, Refused
from .completion_values import run_names
from .parser import Parser

EXAMPLES = {
    "train mv demo1 digits-baseline": "Rename the run and its folder. A run that trains continues.",
}


def add_arguments(parser: Parser) -> None:
    """Add the run and its new name."""
    parser.add_argument("name", metavar="OLD", help="Name of a run, as in train ls.", offer=run_names)
    parser.add_argument("new", metavar="NEW", help="New name of the run.")


def run(options: Namespace, runs: Path) -> int:
    """Rename the folder of the run. A run that trains continues."""
    from ..cluster import jobs
    from ..launcher.tmux import note_move
    from ..run import folders
    from ..run.run_folder import Run

    found = folders.find(runs, options.name)
    record = found.read()
    if jobs.is_submitted(record) or record.get("cluster"):
        raise Refused(f"{found.name} cannot be renamed: a cluster or other machines know its name; use train fork")
    if record.get("trial_of"):
        raise Refused(
            f"{found.name} is a trial of a sweep, which knows it by its name; to keep it without the sweep: "
            f"train export {found.name}, or train fork {found.name} --name NEW"
        )
    if record.get("sweep"):
        raise Refused(f"{found.name} is a sweep, whose trials are named after it; start another one under that name")
    folders.check_free(found.folder.parent, options.new)
    note_move(Run(found.folder.rename(found.folder.with_name(options.new))), record, found.folder)
    screen.say(f"renamed {options.name} to {options.new}")
    return EXIT_FINISHED

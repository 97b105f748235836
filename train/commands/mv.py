"""`train mv`: give a run another name."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from train import screen
from train.commands.completion_values import run_names
from train.commands.parser import Parser
from train.errors import EXIT_FINISHED, Refused


def add_arguments(parser: Parser) -> None:
    """Which run, and its new name."""
    parser.add_argument("name", metavar="OLD", help="a run; train ls lists them", offer=run_names)
    parser.add_argument("new", metavar="NEW", help="its new name")


def run(options: Namespace, runs: Path) -> int:
    """Rename its folder; a run that trains goes on."""
    from train.cluster import jobs
    from train.launcher.tmux import note_move
    from train.run import folders
    from train.run.run_folder import Run

    found = folders.find(runs, options.name)
    record = found.read()
    if jobs.is_submitted(record) or record.get("cluster"):
        raise Refused(f"{found.name} is known to a cluster, or to its other machines, by its name, and keeps it")
    folders.check_free(found.folder.parent, options.new)
    note_move(Run(found.folder.rename(found.folder.with_name(options.new))), found.folder)
    screen.say(f"{options.name} is {options.new} now")
    return EXIT_FINISHED

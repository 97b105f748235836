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
    """Rename its folder, and those of its other nodes; one that trains goes on."""
    from train.cluster import jobs
    from train.launcher.tmux import note_move
    from train.run import folders, states
    from train.run.run_folder import Run

    found = folders.find(runs, options.name)
    record, parts = found.read_effective(), [found, *jobs.other_nodes(found)]
    locks = [part.acquire(patience=0.1) for part in parts]  # none is resumed meanwhile
    is_over = record["state"] in (states.FINISHED, states.FAILED)
    if jobs.is_submitted(record) and not is_over:
        raise Refused(f"{found.name} was handed to an engine, which has it by its name; rename it when it has finished")
    if record.get("cluster") and None in locks:
        raise Refused(f"{found.name} is running on several machines; first: train stop {found.name}")
    for part in parts:
        folders.check_free(part.folder.parent, options.new)
    for part, lock in zip(parts, locks, strict=True):
        new = part.folder.with_name(options.new)
        part.folder.rename(new)
        note_move(Run(new), part.folder, is_living=lock is None)
    screen.say(f"{options.name} is {options.new} now")
    return EXIT_FINISHED

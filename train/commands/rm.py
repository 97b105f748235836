"""`train rm`: delete runs."""

from __future__ import annotations

import contextlib
import fnmatch
from argparse import Namespace
from pathlib import Path

from .. import format, screen
from ..cluster import jobs
from ..errors import EXIT_FINISHED, Refused
from ..launcher import tmux
from ..mirror import state
from ..run import folders
from ..sweeps.kept import note_removed, own_runs
from ..sweeps.space import sweep_name
from .options import add_names, matching
from .parser import Parser

EXAMPLES = {
    "train rm demo1": "Delete the run with its checkpoints. A running run is refused.",
    "train rm lr": "Delete a sweep with its trials.",
    "train rm 'exp-*'": "Delete all runs of these names; none of them if one is running.",
}


def add_arguments(parser: Parser) -> None:
    """Add the runs."""
    add_names(parser, "+")


def run(options: Namespace, runs: Path) -> int:
    """Delete all of these runs, with the folders of their other nodes; none of them if one is alive."""
    for name in tmux.checking(runs):
        if any(fnmatch.fnmatchcase(name, given) for given in options.names):
            raise tmux.being_checked(name)
    named = {run.name: run for run in matching(runs, options.names)}
    found = [*(named | {trial.name: trial for run in named.values() for trial in own_runs(run)}).values()]
    every = [*found, *(other for run in found for other in jobs.other_nodes(run))]
    with contextlib.ExitStack() as held:
        for run in found:
            held.enter_context(jobs.without_job(run))
        for run in every:
            lock = run.acquire()
            if lock is None:
                also = f"; none of these {len(found)} runs was removed" if len(found) > 1 else ""
                raise Refused(f"{run.name} is {run.stands()}; stop it first: train stop {run.name}{also}")
            held.callback(lock.release)
        stays = [line for run in found if (line := jobs.remove_job(run))]
        stays += [f"the mirror of {run.name} stays: {url}" for run in found if (url := state.read(run).url)]
        sizes = [folders.size_of(run.folder) for run in found]
        gone = {run.name for run in found}
        for run in found:
            if sweep_name(run.name) not in gone:
                note_removed(run)
        for run in reversed(every):
            folders.delete_locked(run)
    for line in stays:
        screen.remark(line)
    for run, size in zip(found, sizes, strict=True):
        screen.say(f"removed {screen.name(run.name)}: {format.size(size)}")
    return EXIT_FINISHED

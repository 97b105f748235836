"""`train rm`: delete run folders."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from pathlib import Path

from train import screen
from train.cluster import jobs
from train.commands import choose_runs
from train.commands.options import add_names
from train.commands.parser import Parser
from train.errors import EXIT_FINISHED, Refused
from train.run import folders
from train.run.run_folder import Run


def add_arguments(parser: Parser) -> None:
    """Which runs."""
    add_names(parser, "+")


def run(options: Namespace, runs: Path) -> int:
    """Delete all of them, or none where one is alive."""
    found = choose_runs.matching(runs, options.names)
    for line in _remove_all(found):
        screen.remark(line)
    if any(map(choose_runs.is_pattern, options.names)):  # which ones that were is not in the command
        screen.say(f"removed {', '.join(run.name for run in found)}")
    return EXIT_FINISHED


def _remove_all(runs: list[Run]) -> list[str]:
    """Delete run folders: all of them, or none where one is alive. Returns lines about what stays of them elsewhere.

    Raises:
        Refused: a run is alive, or a folder cannot be removed.
    """
    every = [*runs, *(other for run in runs for other in jobs.other_nodes(run))]
    with contextlib.ExitStack() as held:
        for run in runs:
            held.enter_context(jobs.without_job(run))
        for run in every:
            lock = run.acquire()
            if lock is None:
                also = f"; nothing was removed of these {len(runs)} runs" if len(runs) > 1 else ""
                raise Refused(f"{run.name} is running; first: train stop {run.name}{also}")
            held.callback(lock.release)
        stays = [line for run in runs if (line := jobs.remove_job(run))]
        for run in reversed(every):
            folders.delete_locked(run)
    return stays

"""`train rm`: delete run folders."""

from __future__ import annotations

import contextlib
import os
from argparse import Namespace
from pathlib import Path

from train import format, screen
from train.cluster import jobs
from train.commands.options import add_names, matching
from train.commands.parser import Parser
from train.errors import EXIT_FINISHED, Refused
from train.run import folders
from train.run.run_folder import Run


def add_arguments(parser: Parser) -> None:
    """Which runs."""
    add_names(parser, "+")


def run(options: Namespace, runs: Path) -> int:
    """Delete all of them, or none where one is alive."""
    found = matching(runs, options.names)
    removed = [f"removed {screen.name(run.name)}: {_content(run)}" for run in found]
    for line in _remove_all(found):
        screen.remark(line)
    for line in removed:
        screen.say(line)
    return EXIT_FINISHED


def _content(run: Run) -> str:
    """What a run folder holds: `finished, 276 steps, 1.2 MiB`."""
    files = [Path(folder, name) for folder, _, names in os.walk(run.folder) for name in names]
    size = 0
    for file in files:
        with contextlib.suppress(OSError):  # a run that lives prunes its checkpoints
            size += file.lstat().st_size
    try:
        record = run.read_effective()
    except Refused:
        return f"its run.json could not be read, {format.size(size)}"
    steps = f", {record['step']} steps" if record.get("total_steps") else ""
    return f"{record['state']}{steps}, {format.size(size)}"


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

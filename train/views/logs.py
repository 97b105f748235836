"""`train logs`: print the output of a rank. Imports no torch."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TextIO

from .. import screen
from ..cluster import jobs
from ..cluster.engine import call
from ..errors import EXIT_FINISHED, Refused
from ..launcher.live_view import LogTail
from ..monitor.status import here
from ..run import states
from ..run.progress_lines import EVERY
from ..run.run_folder import Run
from .follow import follow

ALL = 0
"""Stands for all attempts, in their order."""
_ASK_EVERY = 2.0
"""Seconds between two queries to a cluster's engine."""


def print_log(run: Run, *, rank: int, attempt: int | None, go_on: bool, stream: TextIO | None = None) -> int:
    """Print the output of a rank; with `go_on` also what is written until the run ends.

    Of a line that is redrawn, such as a progress bar, the last state is printed. A terminal that follows shows it
    redrawn.

    Args:
        attempt: number of the attempt, counted from 1, or ALL; None: the last one, and with `go_on` later ones.
        stream: where to print; None: standard output.

    Raises:
        Refused: the run has no such attempt or rank.
    """
    record, stream = here(run, of_any_format=True).record, stream or sys.stdout
    if not jobs.is_submitted(record):
        return _print_files(run, rank, attempt, go_on, stream)
    command = jobs.engine_of(record).logs(record, rank)
    if command is None:
        while go_on and jobs.status(run, lambda _: None)["state"] == states.QUEUED:
            time.sleep(_ASK_EVERY)
        return _print_files(_of_rank(run, rank), rank, attempt, go_on, stream)
    if attempt is not None:
        raise Refused(f"--attempt: the engine keeps only the output of the last pods of {run.name}; leave it out")
    if go_on:
        return follow(run, rank)
    stream.write(call(*command))
    stream.flush()
    return EXIT_FINISHED


def _of_rank(run: Run, rank: int) -> Run:
    """Return the run folder of the node that has the logs of this rank."""
    found = [one for one in (run, *jobs.other_nodes(run)) if any(one.folder.glob(f"logs/attempt-*/rank{rank}.log"))]
    return found[0] if found else run


def _print_files(run: Run, rank: int, attempt: int | None, go_on: bool, stream: TextIO) -> int:
    """Print the output of a rank whose logs are in this run folder; arguments as in `print_log`."""
    if not _last(run):
        if not go_on:
            why = f" ({reason})" if (reason := here(run, of_any_format=True).reason) else ""
            raise Refused(f"{run.name} has not started yet{why}; wait for it: train logs {run.name} --follow")
        while not _last(run) and run.alive():
            time.sleep(0.1)
    number = attempt or (1 if attempt == ALL else _last(run))
    _tell(run, number, attempt)
    while True:
        path = run.logs(number) / f"rank{rank}.log"
        if path.exists():
            _print(run, path, number, go_on, stream)
        elif (attempt or number >= _last(run)) and not (go_on and run.alive()):  # an earlier attempt may lack it
            _refuse(run, number, rank)
        if attempt:
            return EXIT_FINISHED
        if number < _last(run):
            number += 1
            screen.remark(f"attempt {number}:")
        elif not go_on or (path.exists() and not run.alive()):
            return EXIT_FINISHED
        else:
            time.sleep(0.1)


def _last(run: Run) -> int:
    """Return the number of the last attempt; 0: there was none."""
    one = here(run, of_any_format=True)
    if one.state != states.OTHER_FORMAT:
        return len(one.record["attempts"])
    found = [path.name.rpartition("-")[2] for path in run.folder.glob("logs/attempt-*")]
    return max((int(number) for number in found if number.isascii() and number.isdigit()), default=0)


def _tell(run: Run, shown: int, attempt: int | None) -> None:
    """Say on stderr which of several attempts is shown. stdout carries only the output of the rank."""
    last = _last(run)
    if last < 2:
        return
    if attempt == ALL:
        screen.remark(f"all {last} attempts; attempt 1:")
    elif shown <= last:
        screen.remark(f"attempt {shown} of {last}; to see others: train logs {run.name} --attempt N, or --attempt all")


def _refuse(run: Run, attempt: int, rank: int) -> None:
    if not run.logs(attempt).is_dir():
        raise Refused(f"{run.name} has no attempt {attempt}; the last one is {_last(run)}")
    known = sorted(path.stem.removeprefix("rank") for path in run.logs(attempt).glob("rank*.log"))
    raise Refused(f"{run.name} has no output of rank {rank}; ranks with output: {', '.join(known) or 'none'}")


def _print(run: Run, path: Path, attempt: int, go_on: bool, stream: TextIO) -> None:
    """Print a log to its end; with `go_on`, until its attempt has ended."""
    tail = LogTail(path, stream, every=EVERY if go_on else None)
    while go_on and _last(run) <= attempt and run.alive():
        tail.update()
        time.sleep(0.2)
    tail.end()

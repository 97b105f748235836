"""`--follow`: show the progress of a run, its state on a cluster, and its end. Imports no torch."""

from __future__ import annotations

import datetime
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Protocol

from .. import programs, screen
from ..cluster import jobs
from ..errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REFUSED
from ..format import figures
from ..launcher.live_view import LiveView
from ..run import states
from ..run.record import Record
from ..run.run_folder import Run
from ..run.spec import spec_of
from ..supervise.decide import CODES
from .listing import with_reason

_LOOK_EVERY, _ASK_EVERY = 0.2, 2.0
"""Seconds between two looks into the run folder, and between two queries to a cluster's engine."""
_LAST = 30.0
"""Seconds to wait until the processes of an ended run are gone."""


def follow(run: Run, rank: int = 0) -> int:
    """Show a run until it has ended. Return the exit code for its end.

    For a task, show a progress bar and the evaluations; for a script or a run on a cluster, the log of a rank. A run
    that its engine queues again has not ended. Ctrl-C ends only the following.
    """
    record = run.read_effective()
    if not jobs.is_submitted(record):
        run = run.held()  # the run may be renamed in the meantime
    view = view_of(run, record)
    try:
        record = watch(run, record, view, rank=rank)
    except KeyboardInterrupt:
        return _leave_alone(run, view)
    view.close()
    return _tell_end(run, record)


class View(Protocol):
    """Shows the progress of a run."""

    def update(self, record: Record) -> None: ...
    def say(self, text: str) -> None: ...


def view_of(run: Run, record: Record) -> LiveView:
    """Return the view of a run in a terminal."""
    is_job = jobs.is_submitted(record)
    shows_log = is_job or programs.of_record(record).shows_log
    return LiveView(run, sys.stdout if is_job else sys.stderr, show_log=shows_log)


def watch(run: Run, record: Record, view: View, *, rank: int = 0, timeout: float = math.inf) -> Record:
    """Show a run until it ends. Return its last record, with the effective state.

    Args:
        rank: the rank whose log a cluster shows.
        timeout: seconds after which to return although the run has not ended.
    """
    until = time.monotonic() + timeout
    return _watch_job(run, record, view, rank, until) if jobs.is_submitted(record) else _watch(run, record, view, until)


def _watch(run: Run, record: Record, view: View, until: float) -> Record:
    """Show a run of this station until it ends. Return its final record."""
    show_change = _Changes(view.say)
    while record["state"] in (states.RUNNING, states.CREATED):
        if time.monotonic() > until:
            return record
        view.update(record)
        if record.get("reason"):  # a running run with a reason waits for other machines
            show_change(record["reason"])
        time.sleep(_LOOK_EVERY)
        record = run.read_effective()
    _wait_until_dead(run)
    record = run.read_effective()
    view.update(record)
    return record


def _watch_job(run: Run, record: Record, view: View, rank: int, until: float) -> Record:
    """Show a submitted run until it has ended. Return its final record."""
    engine = jobs.engine_of(record)
    is_elsewhere, since = engine.logs(record, rank) is not None, ""
    show_change = _Changes(screen.remark)
    while True:
        record, is_over = jobs.poll(run, show_change)
        if not is_over:
            attempts = record.get("attempts") or []
            which = f", attempt {len(attempts)}" if record["state"] == states.RUNNING and len(attempts) > 1 else ""
            show_change(f"{run.name} is {with_reason(record['state'] + which, record.get('reason'))}")
        if not is_elsewhere:
            view.update(record)
        elif record["state"] == states.RUNNING or (is_over and not since):
            command = engine.logs(record, rank, since)
            assert command is not None
            # ends with the pods; while they do not exist yet the command fails, and is repeated
            if subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0:
                since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        if is_over:
            _wait_until_dead(run)
        if is_over or time.monotonic() > until:
            return record
        time.sleep(_LOOK_EVERY if run.alive() else _ASK_EVERY)


def _wait_until_dead(run: Run) -> None:
    """Wait until the processes of an ended run are gone, because the caller may remove or resume the run."""
    until = time.monotonic() + _LAST
    while run.alive() and time.monotonic() < until:
        time.sleep(0.05)


class _Changes:
    """Prints a line unless it equals the one before."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._last = say, ""

    def __call__(self, text: str) -> None:
        if text != self._last:
            self._last = text
            self._say(text)


def _leave_alone(run: Run, view: LiveView) -> int:
    """End the following after Ctrl-C. Return the exit code. The run continues."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C means the same
    view.close()
    print(file=sys.stderr)  # behind the ^C that the terminal shows
    screen.say(f"{run.name} continues; to follow it again: train logs {run.name} --follow")
    return EXIT_INTERRUPTED


def _tell_end(run: Run, record: Record) -> int:
    """Print how a run ended. Return the exit code for its end.

    Args:
        record: run.json with the effective state.
    """
    state, step = record["state"], record.get("step", 0)
    reason = f": {record['reason']}" if record.get("reason") else ""
    why = f" ({record['reason']})" if record.get("reason") else ""
    results = figures(record.get("metrics") or {})
    then = programs.of_record(record).after_stop(spec_of(record, {}), run.name)
    last = {
        states.FINISHED: f"{run.name} finished after {step} steps{why}  {results}".rstrip(),
        states.STOPPED: f"{run.name} {record['reason'] or 'stopped'}; {then}",
        states.FAILED: f"{run.name} failed{reason}",
        states.INTERRUPTED: f"{run.name} was interrupted{reason}",
        states.COPY: f"{run.name} was interrupted{reason}",
    }.get(state, f"{run.name} is {state}")
    if not record.get("total_steps") and not step and state == states.FINISHED:  # its steps are unknown
        last = f"{run.name} finished{why}"
    if state == states.FAILED and record["attempts"]:
        for text in record["attempts"][-1].get("last_lines") or ():
            screen.say(f"  | {text}")
    screen.say(last)
    return EXIT_REFUSED if state == states.FAILED and record.get(states.REFUSED) else CODES.get(state, EXIT_FAILED)

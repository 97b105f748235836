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

from .. import screen
from ..cluster import jobs
from ..errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REFUSED
from ..format import figures
from ..launcher.live_view import LiveView
from ..monitor.status import RunStatus, here
from ..run import states
from ..run.record import Record
from ..run.run_folder import Run
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
    one = first_look(run)
    view = view_of(one)
    try:
        one = watch(one, view, rank=rank)
    except KeyboardInterrupt:
        return _leave_alone(one.run, view)
    view.close()
    return _tell_end(one)


class View(Protocol):
    """Shows the progress of a run."""

    def update(self, record: Record) -> None: ...
    def say(self, text: str) -> None: ...


def first_look(run: Run) -> RunStatus:
    """Return how a run stands, for `watch`. Its folder stays open, because it may be renamed in the meantime."""
    one = here(run)
    return one if jobs.is_submitted(one.record) else RunStatus(run.held(), one.record)


def view_of(one: RunStatus) -> LiveView:
    """Return the view of a run in a terminal."""
    is_job = jobs.is_submitted(one.record)
    return LiveView(one.run, sys.stdout if is_job else sys.stderr, show_log=is_job or one.program.shows_log)


def watch(one: RunStatus, view: View, *, rank: int = 0, timeout: float = math.inf) -> RunStatus:
    """Show a run until it ends. Return how it stands then.

    Args:
        rank: the rank whose log a cluster shows.
        timeout: seconds after which to return although the run has not ended.
    """
    until = time.monotonic() + timeout
    return _watch_job(one, view, rank, until) if jobs.is_submitted(one.record) else _watch(one, view, until)


def _watch(one: RunStatus, view: View, until: float) -> RunStatus:
    """Show a run of this station until it ends. Return how it stands then."""
    show_change = Changes(view.say)
    while one.is_alive:
        if time.monotonic() > until:
            return one
        view.update(one.record)
        if one.reason:  # it waits: for GPUs, other runs or other machines
            show_change(one.reason)
        time.sleep(_LOOK_EVERY)
        one = here(one.run)
    _wait_until_dead(one.run)
    one = here(one.run)
    view.update(one.record)
    return one


def _watch_job(one: RunStatus, view: View, rank: int, until: float) -> RunStatus:
    """Show a submitted run until it has ended. Return how it stands then."""
    run, engine = one.run, jobs.engine_of(one.record)
    is_elsewhere, since = engine.logs(one.record, rank) is not None, ""
    show_change = Changes(screen.remark)
    while True:
        record, is_over = jobs.poll(run, show_change)
        one = RunStatus(run, record)
        if not is_over:
            count = len(record["attempts"])
            which = f", attempt {count}" if one.state == states.RUNNING and count > 1 else ""
            show_change(f"{run.name} is {with_reason(one.state + which, one.reason)}")
        if not is_elsewhere:
            view.update(one.record)
        elif one.state == states.RUNNING or (is_over and not since):
            command = engine.logs(record, rank, since)
            assert command is not None
            # ends with the pods; while they do not exist yet the command fails, and is repeated
            if subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0:
                since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        if is_over:
            _wait_until_dead(run)
        if is_over or time.monotonic() > until:
            return one
        time.sleep(_LOOK_EVERY if run.alive() else _ASK_EVERY)


def _wait_until_dead(run: Run) -> None:
    """Wait until the processes of an ended run are gone, because the caller may remove or resume the run."""
    until = time.monotonic() + _LAST
    while run.alive() and time.monotonic() < until:
        time.sleep(0.05)


class Changes:
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


def _tell_end(one: RunStatus) -> int:
    """Print how a run ended. Return the exit code for its end."""
    last, code = end_line(one)
    if one.state == states.FAILED and one.record["attempts"]:
        for text in one.record["attempts"][-1].get("last_lines") or ():
            screen.say(f"  | {text}")
    screen.say(last)
    return code


def end_line(one: RunStatus) -> tuple[str, int]:
    """Return how a run ended, as a line, and the exit code for its end."""
    name, state, step, record = one.name, one.state, one.record["step"], one.record
    reason = f": {one.reason}" if one.reason else ""
    why = f" ({one.reason})" if one.reason else ""
    results = figures(record.get("metrics") or {})
    then = one.program.after_stop(one.spec, name)
    last = {
        states.FINISHED: f"{name} finished after {step} steps{why}  {results}".rstrip(),
        states.STOPPED: f"{name} {one.reason or 'stopped'}; {then}",
        states.FAILED: f"{name} failed{reason}",
        states.INTERRUPTED: f"{name} was interrupted{reason}",
        states.COPY: f"{name} was interrupted{reason}",
        states.CREATED: f"{name} never started; try again: train resume {name}",
    }.get(state, f"{name} is {state}")
    has_steps = (one.total or step) and not one.program.launches_trials
    if not has_steps and state == states.FINISHED:
        last = f"{name} finished{why}"
    code = EXIT_REFUSED if state == states.FAILED and record.get(states.REFUSED) else CODES.get(state, EXIT_FAILED)
    return last, code

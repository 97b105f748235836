"""What a run that an engine of a cluster starts has to say: its logs, wherever they lie, and how it stands."""

from __future__ import annotations

import datetime
import subprocess
import sys
import time

from train import screen
from train.cluster.engine import call
from train.cluster.jobs import engine_of, is_submitted, other_nodes, poll, status
from train.errors import EXIT_FINISHED, Refused
from train.launcher.progress import View
from train.run import states
from train.run.run_folder import Run
from train.views import logs
from train.views.follow import left_alone, tell_end
from train.views.listing import with_reason

_LOOK_EVERY, _ASK_EVERY = 0.2, 2.0
"""Seconds between two looks into the folder, and two questions to an engine: many ask it."""
_LAST = 10.0
"""Seconds for the processes of a run that has ended to go."""


def follow(run: Run, rank: int = 0) -> int:
    """Show how a run stands, on stderr, and what a rank prints, on stdout, until nothing more comes of it by itself.

    One that its engine queues again is not over. Returns the exit code that stands for its end; Ctrl-C ends the
    following only.
    """
    engine = engine_of(run.read())
    is_elsewhere, since = engine.logs(run, rank) is not None, ""
    view, show_change = View(run, sys.stdout, show_log=True), _Changes()
    try:
        while True:
            record, is_over = poll(run, show_change)
            if not is_over:
                attempts = record.get("attempts") or []
                which = f", attempt {len(attempts)}" if record["state"] == states.RUNNING and len(attempts) > 1 else ""
                show_change(f"{run.name} is {with_reason(record['state'] + which, record.get('reason'))}")
            if not is_elsewhere:
                view.update(record)
            elif record["state"] == states.RUNNING or (is_over and not since):
                command = engine.logs(run, rank, since)
                assert command is not None
                # until its pods end; of some that are not there yet the engine's tool complains, and is asked again
                if subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0:
                    since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            if is_over:
                break
            time.sleep(_LOOK_EVERY if run.alive() else _ASK_EVERY)
        until = time.monotonic() + _LAST
        while run.alive() and time.monotonic() < until:  # what follows may remove it
            time.sleep(_LOOK_EVERY)
    except KeyboardInterrupt:
        return left_alone(run, view.close)
    view.close()
    return tell_end(run, record)


class _Changes:
    """Prints each line once, and again only after another one."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, text: str) -> None:
        if text != self._last:
            self._last = text
            screen.say(f"train: {text}")


def print_log(run: Run, rank: int, attempt: int | None, go_on: bool) -> int:
    """Print the output of a rank, wherever it lies; see logs.print_log.

    Raises:
        Refused: there is no such attempt or rank.
    """
    record = run.read()
    if not is_submitted(record):
        return logs.print_log(run, rank, attempt, go_on)
    command = engine_of(record).logs(run, rank)
    if command is None:
        while go_on and status(run, lambda _: None)["state"] == states.QUEUED:
            time.sleep(_ASK_EVERY)
        return logs.print_log(_of_rank(run, rank), rank, attempt, go_on)
    if attempt is not None:
        raise Refused(f"--attempt: of {run.name}, its engine has what the last pods said; leave it out")
    if go_on:
        return follow(run, rank)
    sys.stdout.write(call(*command))
    sys.stdout.flush()
    return EXIT_FINISHED


def _of_rank(run: Run, rank: int) -> Run:
    """The folder with the logs of that rank: its node's."""
    found = [one for one in (run, *other_nodes(run)) if any(one.folder.glob(f"logs/attempt-*/rank{rank}.log"))]
    return found[0] if found else run

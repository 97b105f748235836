"""Watching a run that the engine of a cluster starts: from its queue, through all its starts, to its end. No torch."""

from __future__ import annotations

import sys
import time
from typing import Any

from train import screen
from train.cluster.engines import engine
from train.cluster.submission import Log
from train.record import store
from train.record.store import Run
from train.record.table import with_reason
from train.runs import standing
from train.runs.follow import View, left_alone, tell_end

_LOOK_EVERY, _ASK_EVERY = 0.2, 2.0
"""Seconds between two looks into the folder, and two questions to an engine: many ask it."""
_LET_GO = 30.0
"""Seconds, at most, that one waits for an engine to clear away a job whose run has ended."""


def follow(run: Run, rank: int = 0) -> int:
    """Show how a run stands, on stderr, and what a rank prints, on stdout, until nothing more comes of it by itself.

    One that its engine queues again is not over. Returns the exit code that stands for its end; Ctrl-C ends the
    following only.

    Args:
        rank: of a run that is kept in the cluster; else it is 0.
    """
    record = run.read()
    is_far = standing.is_far(record)
    view: Log = engine(record["submitted"]["engine"]).log(run, rank) if is_far else View(run, sys.stdout, show_log=True)
    tell, warn = _Teller(), _Teller()
    try:
        record, is_over = standing.settled(run, warn)
        while not is_over:
            tell(_words(record))
            view.update(record)
            time.sleep(_LOOK_EVERY if record["state"] == store.RUNNING and not is_far else _ASK_EVERY)
            record, is_over = standing.settled(run, warn)
        view.update(record)
        until = time.monotonic() + _LET_GO
        while (run.alive() or standing.is_held(run)) and time.monotonic() < until:  # what follows may remove it
            time.sleep(_ASK_EVERY)
    except KeyboardInterrupt:
        return left_alone(run, view.close)
    view.close()
    return tell_end(run, record)


class _Teller:
    """Says each line once, and again only when another one was said since."""

    def __init__(self) -> None:
        self._said = ""

    def __call__(self, text: str) -> None:
        if text != self._said:
            self._said = text
            screen.say(f"train: {text}")


def _words(record: dict[str, Any]) -> str:
    """How a run stands, in a line."""
    attempts = record.get("attempts") or []
    which = f", attempt {len(attempts)}" if record["state"] == store.RUNNING and len(attempts) > 1 else ""
    return f"{record['name']} is {with_reason(record['state'] + which, record.get('reason'))}"


def wait_for_start(run: Run) -> None:
    """Wait while an engine has the run in its queue."""
    while standing.shown(run, lambda _: None)["state"] == store.QUEUED:
        time.sleep(_ASK_EVERY)

"""Watching a run that the engine of a cluster starts: from its queue, through all its starts, to its end. No torch."""

from __future__ import annotations

import sys
import time
from typing import Any

from train.record import store
from train.record.store import Run
from train.record.table import with_reason
from train.runs import submitted
from train.runs.follow import View, left_alone, tell_end

_LOOK_EVERY, _ASK_EVERY = 0.2, 2.0
"""Seconds between two looks into the folder, and two questions to an engine: many ask it."""
_LET_GO = 30.0
"""Seconds, at most, that one waits for an engine to clear away a job whose run has ended."""


def follow(run: Run) -> int:
    """Show how a run stands, on stderr, and what rank 0 prints, on stdout, until nothing more comes of it by itself.

    One that its engine queues again is not over. Returns the exit code that stands for its end; Ctrl-C ends the
    following only.
    """
    view, said = View(run, sys.stdout, show_log=True), ""
    try:
        record, is_over = submitted.settled(run)
        while not is_over:
            said = _tell(record, said)
            view.update(record)
            time.sleep(_LOOK_EVERY if record["state"] == store.RUNNING else _ASK_EVERY)
            record, is_over = submitted.settled(run)
        view.update(record)
        until = time.monotonic() + _LET_GO
        while (run.alive() or submitted.is_held(run)) and time.monotonic() < until:  # what follows may remove it
            time.sleep(_ASK_EVERY)
    except KeyboardInterrupt:
        return left_alone(run, view.close)
    view.close()
    return tell_end(run, record)


def _tell(record: dict[str, Any], before: str) -> str:
    """Say how it stands, if that is not what was said before. Returns what has been said."""
    attempts = record.get("attempts") or []
    which = f", attempt {len(attempts)}" if record["state"] == store.RUNNING and len(attempts) > 1 else ""
    text = with_reason(record["state"] + which, record.get("reason"))
    if text != before:
        print(f"train: {record['name']} is {text}", file=sys.stderr, flush=True)
    return text

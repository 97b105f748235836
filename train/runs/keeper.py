"""`train keeper`: brings interrupted runs back, at its start and for as long as it lives; saves all on SIGTERM.

Safe beside other keepers and beside users: whoever takes a run's lock first has it. Imports no torch.
"""

from __future__ import annotations

import signal
import socket
import sys
import threading
from pathlib import Path

from train.errors import FINISHED, Refused
from train.runs import launch, store
from train.runs.recover import resumable
from train.runs.store import Run

LOOK_EVERY = 2.0
"""Seconds between two looks at the runs."""
TIMES = 3
"""Resumes in a row without a new checkpoint after which a run is failed."""


class _Told:
    """Says each thing about a run once, and again only when it has changed."""

    def __init__(self) -> None:
        self._last: dict[str, str] = {}

    def __call__(self, run: Run, text: str) -> None:
        if self._last.get(run.name) != text:
            self._last[run.name] = text
            print(f"{store.now()} {run.name}: {text}", file=sys.stderr, flush=True)


def keep(runs: Path, once: bool) -> int:
    """Look after the runs until SIGTERM or SIGINT, then stop and save those of this host. Returns an exit code.

    With `once`: resume what was interrupted and return.
    """
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    tell = _Told()
    if not once:
        print(f"{store.now()} keeping the runs in {runs}", file=sys.stderr, flush=True)
    while not ended.is_set():
        for run in store.every(runs):
            if ended.is_set():
                break
            try:
                _look_after(run, tell)
            except Refused as error:
                tell(run, f"cannot be resumed: {error}")
            except OSError as error:
                tell(run, f"cannot be looked after: {error}")
        if once:
            return FINISHED
        ended.wait(LOOK_EVERY)
    return _stop_all(runs, tell)


def _look_after(run: Run, tell: _Told) -> None:
    record = run.read()
    # between its creation and its first attempt a run is nobody's for a moment
    is_stillborn = record["state"] == store.CREATED and not run.alive() and _age(record["created"]) > 30
    if not (resumable(run) or is_stillborn):
        return
    saved = next(iter(run.steps_saved()), 0)
    kept = record.get("kept") or {"step": -1, "times": 0}
    times = kept["times"] + 1 if kept["step"] == saved else 1
    if times > TIMES:
        lock = run.acquire()
        if lock is not None:
            reason = f"interrupted {TIMES} times in a row without a new checkpoint after step {saved}"
            run.update(state=store.FAILED, reason=reason, ended=store.now())
            lock.release()
            tell(run, f"{reason}; not resumed any more")
        return
    run.update(durable=False, kept={"step": saved, "times": times})
    for line in launch.start(launch.Order(kind="resume", runs=str(run.folder.parent), name=run.name)):
        tell(run, f"warning: {line}")
    tell(run, f"resumed after step {saved}" + (f" for the {times}th time" if times > 1 else ""))


def _age(stamp: str) -> float:
    import datetime

    return (datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(stamp)).total_seconds()


def _stop_all(runs: Path, tell: _Told) -> int:
    """Stop the live runs of this host, all at once, and wait until they have saved."""
    mine = [run for run in store.every(runs) if run.alive() and run.read().get("host") == socket.gethostname()]
    waiting = [threading.Thread(target=run.stop, args=(store.KEEPER,)) for run in mine]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join()
    for run in mine:
        record = run.shown()
        tell(run, f"{record['state']}: {record['reason']}" if record["reason"] else record["state"])
    return FINISHED

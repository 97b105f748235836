"""What a user does to a run from outside: stop it, read its output, find those to resume. Imports no torch."""

from __future__ import annotations

import sys
import time
from typing import Any

from train.errors import FAILED, FINISHED, Refused
from train.runs import store
from train.runs.store import Run


def resumable(run: Run) -> bool:
    """Whether `train resume --all` and the keeper take this run: not those that a user stopped, or that failed."""
    try:
        record = run.shown()
    except Refused:
        return False
    return record["state"] == store.INTERRUPTED or rests_by_itself(record)


def rests_by_itself(record: dict[str, Any]) -> bool:
    """Whether a run was stopped, and not by its user."""
    reason = record.get("reason") or ""
    by_user = store.WHO[store.POLITE] in reason or reason.startswith(store.TWICE)
    return bool(record["state"] == store.STOPPED and not by_user)


def count_of(run: Run, record: dict[str, Any]) -> dict[str, int]:
    """The keeper's count for a run that it resumes now: deaths in a row without a new checkpoint. Stops are none."""
    saved = next(iter(run.steps_saved()), 0)
    kept = record.get("kept") or {"step": -1, "times": 0}
    before = kept["times"] if kept["step"] == saved else 0
    stopped = record["state"] == store.STOPPED
    return {"step": saved, "times": before + (0 if stopped else 1)}


def stop(run: Run, now: bool) -> tuple[int, str]:
    """Stop a run and wait until it has. Returns an exit code and a line that says how it stands."""
    while True:
        if run.alive():
            run.stop(store.NOW if now else store.POLITE)
        record = run.shown()
        state = record["state"]
        if not (state == store.INTERRUPTED or rests_by_itself(record)):
            break
        lock = run.acquire()
        if lock is None:  # somebody has just begun to resume it
            continue
        # by the user's wish it rests now: nothing brings it back by itself
        step = next(iter(run.steps_saved()), 0)
        run.update(state=store.STOPPED, reason=f"stopped (train stop); the last checkpoint is of step {step}")
        lock.release()
        record = run.shown()
        state = record["state"]
        break
    if state == store.FAILED:
        return FAILED, f"{run.name} failed: {record['reason']}"
    elif state == store.FINISHED:
        return FINISHED, f"{run.name} has finished"
    return FINISHED, f"{run.name}: {record['reason'] or record['state']}; continue with: train resume {run.name}"


def print_log(run: Run, rank: int, attempt: int | None, go_on: bool) -> int:
    """Print the output of a rank, and with `go_on` what comes until the run ends.

    Raises:
        Refused: there is no such attempt or rank.
    """

    def last() -> int:
        return len(run.read().get("attempts") or [])

    wanted = attempt or last()
    if not wanted:
        if not go_on:
            raise Refused(f"{run.name} has not started yet; wait for it with: train logs {run.name} --follow")
        while not last() and run.alive():
            time.sleep(0.1)
        wanted = last()
    while True:
        path = run.logs(wanted) / f"rank{rank}.log"
        if not path.exists() and not (go_on and run.alive()):
            known = sorted(p.stem.removeprefix("rank") for p in run.logs(wanted).glob("rank*.log"))
            if not run.logs(wanted).is_dir():
                raise Refused(f"{run.name} has no attempt {wanted}; its last is {last()}")
            raise Refused(f"{run.name} has no output of rank {rank}; there is: {', '.join(known) or 'none'}")
        if path.exists():
            with path.open("rb") as file:
                while True:
                    text = file.read(1 << 16)
                    if text:
                        sys.stdout.buffer.write(text)
                        sys.stdout.buffer.flush()
                        continue
                    if not go_on or last() > wanted or not run.alive():
                        break
                    time.sleep(0.2)
        if go_on and attempt is None and (last() > wanted or run.alive()):
            time.sleep(0.1)
            wanted = last()
            if path == run.logs(wanted) / f"rank{rank}.log" and run.alive():
                continue
            if last() >= wanted and path != run.logs(wanted) / f"rank{rank}.log":
                continue
        return FINISHED

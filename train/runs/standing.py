"""How runs stand that were handed to an engine of a cluster: by their folder, and by what the engine says. No torch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from train.cluster.engines import ENGINES, engine
from train.cluster.submission import Silent, Standing
from train.errors import Refused
from train.record import store
from train.record.store import Run
from train.runs import supervise

LOOK_EVERY = 0.5
"""Seconds between two looks at how a job stands."""
_TRIES = 3
"""How often an engine that does not answer is asked again, where something depends on it."""

Tell = Callable[[str], None]
"""Takes a line for people."""
_Standings = Mapping[str, Standing]


def is_submitted(record: dict[str, Any]) -> bool:
    """Whether an engine starts this run, and nobody else."""
    taken = record.get("submitted")
    return isinstance(taken, dict) and "job" in taken and str(taken.get("engine")) in ENGINES


def is_far(record: dict[str, Any]) -> bool:
    """Whether the run is kept in the cluster; what is known of it here is what its engine says."""
    return is_submitted(record) and engine(record["submitted"]["engine"]).FAR


def words_of(record: dict[str, Any]) -> str:
    """What it is there: `job 7 of slurm`."""
    job, name = record["submitted"]["job"], record["submitted"]["engine"]
    return f"job {job} of {name}" if job is not None else f"a run without a known job of {name}"


def effective(runs: Iterable[Run], tell: Tell) -> list[dict[str, Any]]:
    """The records of runs with their effective states. Each place of an engine is asked once, if at all.

    Args:
        tell: is told which engine does not answer where that hides something, and which record cannot be read.
    """
    answers: dict[tuple[str, str | None], _Standings | None] = {}
    found = []
    for run in runs:
        try:
            record = run.shown()
            if is_submitted(record) and record["state"] not in (store.FINISHED, store.FAILED):
                name, at = record["submitted"]["engine"], record["submitted"].get("at")
                if (name, at) not in answers:
                    answers[name, at] = _answer(record, tell)
                record = _seen(run, record, answers[name, at])
            found.append(record)
        except Refused as error:
            tell(str(error))
    return found


def _answer(record: dict[str, Any], tell: Tell) -> _Standings | None:
    """What an engine says; None: nothing."""
    name = record["submitted"]["engine"]
    try:
        return engine(name).standings(record["submitted"].get("at"))
    except Refused as error:
        if engine(name).FAR:
            tell(f"{name} does not answer here ({error}); what is shown is what it said last")
        return None


def shown(run: Run, tell: Tell) -> dict[str, Any]:
    """A run's record with its effective state, the engine's view included.

    Raises:
        Refused: it cannot be read.
    """
    record = run.shown()
    return next(iter(effective([run], tell)), record) if is_submitted(record) else record


def _seen(run: Run, record: dict[str, Any], standings: _Standings | None) -> dict[str, Any]:
    """A record with its effective state. What is learned of a run that is kept elsewhere is kept here, too."""
    seen = judged(record, standings)
    if standings is not None and is_far(record):
        _remember(run, seen)
    return seen


def judged(record: dict[str, Any], standings: _Standings | None) -> dict[str, Any]:
    """A record with its effective state.

    Args:
        standings: what its engine says; None: nothing.
    """
    return seen_from_afar(record, standings) if is_far(record) else seen_by(record, standings)


def seen_by(record: dict[str, Any], standings: _Standings | None) -> dict[str, Any]:
    """A record with its effective state, by the folder and by what its engine says.

    Args:
        standings: the jobs that the engine has not done with; None: it does not say.
    """
    state, what = record["state"], words_of(record)
    if standings is None:  # nobody to ask here: what the folder says is all
        return record | {"state": store.QUEUED} if state == store.CREATED else record
    found = standings.get(str(record["submitted"]["job"]))
    if found is None:
        return _gone(record)
    if not found.is_running:
        return record | {"state": store.QUEUED, "reason": f"{what}: {found.words}"}
    if state == store.CREATED:
        return record | {"state": store.QUEUED, "reason": f"{what}: {found.words}; it has not begun yet"}
    if state == store.INTERRUPTED:  # between two starts, or the lock of another machine cannot be seen here
        return record | {"state": store.RUNNING, "reason": f"{what}: {found.words}"}
    return record


def seen_from_afar(record: dict[str, Any], standings: _Standings | None) -> dict[str, Any]:
    """A record with its effective state, where the engine alone knows that.

    Args:
        standings: all jobs that the engine knows; None: it does not say, and what it said last is shown.
    """
    if standings is None:
        last = record["submitted"].get("seen") or {"state": store.QUEUED, "reason": "nothing yet", "at": "never"}
        return record | {"state": last["state"], "reason": f"as of {last['at']}: {last['reason']}"}
    found = standings.get(str(record["submitted"]["job"]))
    if found is None:
        return _gone(record)
    state = found.ended or (store.RUNNING if found.is_running else store.QUEUED)
    reason = record["reason"] if state == record["state"] == store.STOPPED else f"{words_of(record)}: {found.words}"
    return record | {"state": state, "reason": reason, "parts": list(found.parts)}


def _gone(record: dict[str, Any]) -> dict[str, Any]:
    """A record whose engine has no such job; where it has not begun, somebody waits for it in vain."""
    if record["state"] != store.CREATED:
        return record
    what = f"{words_of(record)} is gone" if record["submitted"]["job"] is not None else "it has no job that is known"
    reason = f"{what}; train resume {record['name']} hands the run over again"
    return record | {"state": store.INTERRUPTED, "reason": reason}


def _remember(run: Run, seen: dict[str, Any]) -> None:
    """Keep what an engine says: for when it does not answer, and of an end for good."""
    rests = seen["state"] in (store.FINISHED, store.FAILED, store.STOPPED)

    def change(record: dict[str, Any]) -> None:
        if not _is_same_job(record, seen):
            return
        record["submitted"]["seen"] = {"state": seen["state"], "reason": seen["reason"], "at": store.now()}
        if not rests and seen["state"] != store.INTERRUPTED:
            record.update(state=store.CREATED, stopped_by=None, ended=None)

    run.note(change)
    if rests:
        with contextlib.suppress(OSError, Refused):  # a folder that is read only: the engine will say it again
            _keep_end(run, seen)


def _keep_end(run: Run, seen: dict[str, Any]) -> None:
    lock = run.acquire()
    if lock is None:  # it is being handed over once more
        return
    try:
        record = run.read()
        if _is_same_job(record, seen) and record["state"] != seen["state"]:
            supervise.rest(run, seen["state"], seen["reason"], record["stopped_by"])
    finally:
        lock.release()


def _is_same_job(record: dict[str, Any], seen: dict[str, Any]) -> bool:
    """Whether the run has not been handed over once more since an engine was asked."""
    return (record.get("submitted") or {}).get("handed") == seen["submitted"].get("handed")


def settled(run: Run, tell: Tell) -> tuple[dict[str, Any], bool]:
    """A run's effective record, and whether nothing more comes of it by itself. Its engine is asked if need be."""
    record = run.shown()
    standings: _Standings | None = None
    if record["state"] not in (store.RUNNING, store.FINISHED, store.FAILED):
        standings = _answer(record, tell)
        record = run.shown()  # after the question: of a job that is gone nobody writes any more
    if record["state"] in (store.RUNNING, store.FINISHED, store.FAILED):
        return record, record["state"] != store.RUNNING
    found = (standings or {}).get(str(record["submitted"]["job"]))
    is_over = standings is not None and (found is None or found.ended is not None)
    return _seen(run, record, standings), is_over


def is_held(run: Run) -> bool:
    """Whether an engine says that it has not done with a run."""
    record = run.read()
    found = (_answer(record, lambda _: None) or {}).get(str(record["submitted"]["job"]))
    return found is not None and found.ended is None


def of_job(record: dict[str, Any]) -> Standing | None:
    """How the job stands; None: it is not there any more.

    Raises:
        Refused: the engine does not say.
    """
    name, job = record["submitted"]["engine"], str(record["submitted"]["job"])
    for left in reversed(range(_TRIES)):  # a busy controller
        try:
            return engine(name).standings(record["submitted"].get("at")).get(job)
        except Silent as error:
            if not left:
                raise Refused(
                    f"{name} does not answer here ({error}), and {record['name']} is {words_of(record)}; try again, or "
                    "go to where it does"
                ) from None
            time.sleep(LOOK_EVERY)
    raise AssertionError("not reached")

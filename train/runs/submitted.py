"""Runs that were handed to an engine of a cluster: how they stand there, how they stop and go on. Imports no torch."""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Iterable
from typing import Any

from train.cluster.engines import ENGINES, engine
from train.cluster.submission import FILE, Standing, of_others, to_json
from train.errors import Refused
from train.record import store
from train.record.store import Run
from train.runs import supervise
from train.signals import USER

_LOOK_EVERY = 0.5
"""Seconds between two looks at how a job stands."""
_TRIES = 3
"""How often an engine that does not answer is asked again, where something depends on it."""


def is_submitted(record: dict[str, Any]) -> bool:
    """Whether an engine starts this run, and nobody else."""
    taken = record.get("submitted")
    return isinstance(taken, dict) and "job" in taken and str(taken.get("engine")) in ENGINES


def effective(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records with what the engines say of those that were handed to them. An engine is asked once, if at all."""
    ask = functools.cache(lambda name: engine(name).standings())
    return [
        seen_by(record, ask(record["submitted"]["engine"]))
        if is_submitted(record) and record["state"] not in (store.FINISHED, store.FAILED)
        else record
        for record in records
    ]


def seen_by(record: dict[str, Any], standings: dict[str, Standing] | None) -> dict[str, Any]:
    """A record with its effective state, by the folder and by what its engine says.

    Args:
        standings: the jobs that the engine has not done with; None: it does not say.
    """
    job, state = record["submitted"]["job"], record["state"]
    what = f"job {job} of {record['submitted']['engine']}"
    if standings is None:  # nobody to ask here: what the folder says is all
        return record | {"state": store.QUEUED} if state == store.CREATED else record
    found = standings.get(str(job))
    if found is None:
        if state not in (store.CREATED, store.RUNNING):
            return record
        reason = f"{what} is gone; train resume {record['name']} hands the run over again"
        return record if state == store.RUNNING else record | {"state": store.INTERRUPTED, "reason": reason}
    if not found.is_running:
        return record | {"state": store.QUEUED, "reason": f"{what}: {found.words}"}
    if state == store.CREATED:
        return record | {"state": store.QUEUED, "reason": f"{what}: {found.words}; it has not begun yet"}
    if state == store.INTERRUPTED:  # between two starts, or the lock of another machine cannot be seen here
        return record | {"state": store.RUNNING, "reason": f"{what}: {found.words}"}
    return record


def shown(run: Run) -> dict[str, Any]:
    """A run's record with its effective state, the engine's view included."""
    return effective([run.shown()])[0]


def settled(run: Run) -> tuple[dict[str, Any], bool]:
    """A run's effective record, and whether nothing more comes of it by itself. Its engine is asked if need be."""
    record = run.shown()
    if record["state"] in (store.RUNNING, store.FINISHED, store.FAILED):
        return record, record["state"] != store.RUNNING
    standings = engine(record["submitted"]["engine"]).standings()
    record = run.shown()  # after the question: of a job that is gone nobody writes any more
    if record["state"] in (store.RUNNING, store.FINISHED, store.FAILED):
        return record, record["state"] != store.RUNNING
    is_over = standings is not None and str(record["submitted"]["job"]) not in standings
    return seen_by(record, standings), is_over


def is_held(run: Run) -> bool:
    """Whether an engine says that it has not done with a run."""
    taken = run.read()["submitted"]
    return str(taken["job"]) in (engine(taken["engine"]).standings() or {})


def _standing(record: dict[str, Any]) -> Standing | None:
    """How the job stands; None: it is not there any more.

    Raises:
        Refused: the engine does not say.
    """
    name, job = record["submitted"]["engine"], record["submitted"]["job"]
    standings = engine(name).standings()
    for _ in range(_TRIES):  # a busy controller
        if standings is not None:
            break
        time.sleep(_LOOK_EVERY)
        standings = engine(name).standings()
    if standings is None:
        raise Refused(f"{name} does not answer here, and {record['name']} is job {job} there; go to where it does")
    return standings.get(str(job))


def stop(run: Run, now: bool) -> None:
    """Let it save and end, or take it out of the queue; return when the engine has done with it.

    Raises:
        Refused: the engine does not say how it stands.
    """
    record = run.read()
    while (standing := _standing(record)) is not None:
        if not standing.is_running:
            engine(record["submitted"]["engine"]).cancel(str(record["submitted"]["job"]))
        elif run.read()["state"] in (store.CREATED, store.RUNNING):
            wanted = store.NOW if now else store.POLITE
            if run.stop_asked() not in (wanted, store.NOW):  # one that is just starting overlooks the first
                run.ask_stop(wanted)
        time.sleep(_LOOK_EVERY)
    run.clear_stop()
    if run.shown()["state"] in (store.FINISHED, store.FAILED):
        return
    lock = run.acquire()
    if lock is None:
        raise Refused(f"{run.name} is still alive though its job has ended; see: train show {run.name}")
    if run.read().get("stopped_by") != USER:
        saved = next(iter(run.steps_saved()), 0)
        reason = f"stopped (train stop); the last checkpoint is of step {saved}"
        supervise.rest(run, store.STOPPED, reason, USER)
    lock.release()


def resume(run: Run, flags: dict[str, str]) -> str:
    """Hand it to its engine again. Returns a line that says what became of it.

    Raises:
        Refused: it is there still, or the engine does not take it.
    """
    record = run.read()
    if record["submitted"]["job"] is not None and (standing := _standing(record)) is not None:
        job = record["submitted"]["job"]
        raise Refused(f"{run.name} is job {job} of {record['submitted']['engine']} ({standing.words}) already")
    path = run.folder / FILE
    before = path.read_text(encoding="utf-8")
    content = json.loads(before)
    fresh = record["total_steps"] is None
    key = "flags" if fresh else "changes"  # what nobody has checked yet is not changed but given
    content[key] = content.get(key, {}) | flags
    lock = run.acquire()
    if lock is None:
        raise Refused(f"{run.name} is running; see: train show {run.name}")
    was: dict[str, Any] = {name: record.get(name) for name in ("state", "reason", "stopped_by", "ended")}
    store.write_atomically(path, to_json(content))
    run.update(state=store.CREATED, reason="being handed over", stopped_by=None, ended=None)
    lock.release()
    try:
        job = engine(record["submitted"]["engine"]).again(run)
    except BaseException:
        store.write_atomically(path, before)
        run.update(**was)
        raise
    return f"job {job} of {record['submitted']['engine']}; how it stands: train show {run.name}"


def check_gone(run: Run) -> None:
    """Raises Refused: an engine would still start the run."""
    record: dict[str, Any] = {}
    with contextlib.suppress(Refused):  # damaged: to be removed all the same
        record = run.read()
    if not is_submitted(record):
        return
    standings = engine(record["submitted"]["engine"]).standings()
    if standings and str(record["submitted"]["job"]) in standings:
        raise Refused(f"{run.name} is job {record['submitted']['job']} still; first: train stop {run.name}")


def wait_for_start(run: Run) -> None:
    """Wait while an engine has the run in its queue."""
    while shown(run)["state"] == store.QUEUED:
        time.sleep(2.0)


def of_rank(run: Run, rank: int) -> Run:
    """The folder with the logs of that rank: its node's."""
    name = f"logs/attempt-*/rank{rank}.log"
    found = [one for one in (run, *others(run)) if any(one.folder.glob(name))]
    return found[0] if found else run


def others(run: Run) -> list[Run]:
    """The same run in the folders of its other nodes."""
    folders = of_others(run.folder.parent, run.name)
    return [Run(folder) for folder in folders if (folder / "run.json").exists()]

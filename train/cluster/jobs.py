"""What a user does with a run that an engine of a cluster starts: submit, look, stop, resume, remove.

The run folder says how the run stands, and the engine how its job does; `with_job_status` puts the two together. A
file that --init names in a cluster is found there, and so is what follows from the machine: a login node has no GPU and
other cores. Imports no torch but to submit.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from train.cluster import engine as engines
from train.cluster.engine import Engine, JobStatus, Submission, engine
from train.errors import Refused
from train.launcher.resumable import gives_more
from train.run import durable, folders, metrics, owner, states
from train.run.record import Record
from train.run.run_folder import Run
from train.signals import USER

_ASK_EVERY = 0.5
"""Seconds between two questions whether a job that was asked to stop has ended."""
_LAST = 10.0
"""Seconds for what is left of the processes of a run whose job has ended."""

Tell = Callable[[str], None]
"""Takes a line for people."""
_Jobs = Mapping[str, JobStatus]


def is_submitted(record: Record) -> bool:
    """Whether an engine alone starts this run."""
    taken = record.get("submitted")
    return isinstance(taken, dict) and taken.get("engine") in engines.ENGINES and bool(record.get("submission"))


def engine_of(record: Record) -> Engine:
    return engine(record["submitted"]["engine"])


def submit(asked: Submission) -> str:
    """Check the request, create the run folder and hand it over; removed where the engine does not take it. Returns a
    line about it, or with `is_dry` what the engine would be given.

    Raises:
        Refused: something is wrong with it; nothing is left behind.
    """
    taker = engine(asked.engine)
    taker.check(asked)
    files, record = _prepared(asked)
    if asked.is_dry:
        return taker.render(asked)
    submitted = {"engine": asked.engine, "at": taker.place(asked)}
    record |= {"submission": asked.id, "submitted": submitted, "reason": f"being handed to {asked.engine}"}
    run = folders.create(asked.runs, asked.name, files | {taker.SCRIPT: taker.render(asked)}, record)
    with run.handing_over():
        message = _hand_over(run, lambda: folders.remove(run))
    return f"{asked.engine}: {message}, from {run.folder / taker.SCRIPT}; how it stands: train show {asked.name}"


def _prepared(asked: Submission) -> tuple[dict[str, str | bytes], dict[str, Any]]:
    """The files that every node reads and what run.json is to have, once task, fields and sizes are checked."""
    from train.launcher.checks import cut_batch
    from train.launcher.request import Request, resolve

    task, config = resolve(Request(asked.task, asked.flags, asked.config_file))
    cut_batch(config, asked.nproc, range(asked.nodes, asked.nodes + 1))
    files: dict[str, str | bytes] = {}
    if not task.is_built_in:
        files[engines.TASK] = task.file.read_bytes()
    if asked.config_file is not None:
        files[engines.CONFIG] = Path(asked.config_file).read_bytes()
    content = {
        "id": asked.id,
        "name": asked.name,
        "task": asked.task if task.is_built_in else str(task.file),
        "task_copy": None if task.is_built_in else engines.TASK,
        "flags": asked.flags,
        "changes": {},  # fields of a resume
        "config_file": engines.CONFIG if asked.config_file is not None else None,
        "cwd": os.getcwd(),
        "nodes": asked.nodes,
        "nproc": asked.nproc,
        "wait_minutes": asked.wait_minutes,
        "max_restarts": asked.max_restarts,
    }
    files[engines.FILE] = json.dumps(content, indent=1) + "\n"
    name = task.name if task.is_built_in else engines.TASK
    return files, {"task": name, "world_size": asked.nodes * asked.nproc, "nproc": asked.nproc}


def _hand_over(run: Run, undo: Callable[[], None]) -> str:
    """Hand it to its engine. Returns what that made of it, also where its answer was lost.

    Args:
        undo: called where the engine has no such job afterwards.
    """
    record = run.read()
    taker, name = engine_of(record), record["submitted"]["engine"]
    try:
        message = taker.submit(run)
    except BaseException as error:
        try:
            job = taker.jobs(record["submitted"]["at"]).get(record["submission"])
            if job is None or not isinstance(error, Refused):  # or Ctrl-C
                taker.remove(run)
        except Refused as silence:
            problem = f"{error}; whether {name} has {run.name} now is not known ({silence})"
            run.note(reason=problem)
            raise Refused(f"{problem}; once it answers: train resume {run.name}") from None
        if job is None or not isinstance(error, Refused):
            undo()
            raise
        message = job.text

    def change(record: Record) -> None:
        if record["state"] == states.CREATED and not run.alive():  # it may run already
            record["reason"] = f"handed to {name}: {message}"

    run.update(change)
    return message


def statuses(runs: Iterable[Run], tell: Tell) -> list[Record]:
    """The records of runs with their effective states. Each place of an engine is asked once, if at all.

    Args:
        tell: called with which engine does not answer, and which record cannot be read.
    """
    answers: dict[tuple[str, str | None], _Jobs | None] = {}
    found = []
    for run in runs:
        try:
            record = _seen(run)
            if is_submitted(record) and record["state"] not in (states.FINISHED, states.FAILED):
                at = record["submitted"]["engine"], record["submitted"].get("at")
                if at not in answers:
                    answers[at] = _answer(record, tell)
                record = with_job_status(record, answers[at])
            found.append(record)
        except Refused as error:
            tell(str(error))
    return found


def status(run: Run, tell: Tell) -> Record:
    """A run's record with its effective state, the engine's view included.

    Raises:
        Refused: it cannot be read.
    """
    record = _seen(run)
    return next(iter(statuses([run], tell)), record) if is_submitted(record) else record


def _seen(run: Run) -> Record:
    """A run's record as its folder shows it, with whose it is."""
    record = metrics.up_to_date(run, run.read_effective())
    record.pop("owner", None)  # which is no word of the run's own
    if other := owner.of_other(run):
        record["owner"] = other
        if record["state"] == states.COPY:  # which a resume would not adopt
            record["reason"] = "another user's; a copy of its folder is yours"
    return record


def _answer(record: Record, tell: Tell) -> _Jobs | None:
    """The jobs of an engine; None: it does not answer."""
    try:
        return engine_of(record).jobs(record["submitted"].get("at"))
    except Refused as error:
        tell(f"{record['submitted']['engine']} does not answer here ({error}); what is shown is what the folder says")
        return None


def with_job_status(record: Record, jobs: _Jobs | None) -> Record:
    """A record with its effective state.

    Args:
        jobs: those of its engine; None: it does not say, and the folder is all.
    """
    state = record["state"]
    if jobs is None:
        return record | {"state": states.QUEUED} if state == states.CREATED else record
    job = jobs.get(str(record.get("submission")))
    if job is None and state == states.CREATED:
        reason = f"its job is gone; train resume {record['name']} hands it over again"
        return record | {"state": states.INTERRUPTED, "reason": reason}
    if job is None or state in (states.FINISHED, states.FAILED):
        return record
    if job.state == states.RUNNING and state in (states.RUNNING, states.STOPPED):
        return record  # the folder knows more
    return record | {"state": job.state, "reason": f"{record['submitted']['engine']}: {job.text}"}


def poll(run: Run, tell: Tell) -> tuple[Record, bool]:
    """A run's effective record, and whether nothing more comes of it by itself."""
    record = run.read_effective()
    jobs: _Jobs | None = None
    if record["state"] not in (states.RUNNING, states.FINISHED, states.FAILED):
        jobs = _answer(record, tell)
        record = run.read_effective()  # after the question: when the job is gone, the record is final
    if record["state"] in (states.RUNNING, states.FINISHED, states.FAILED):
        return record, record["state"] != states.RUNNING
    job = (jobs or {}).get(record["submission"])
    return with_job_status(record, jobs), jobs is not None and (job is None or job.is_over)


def _job_of(run: Run) -> JobStatus | None:
    """Its job; None: the engine has none that is not over.

    Raises:
        Refused: the engine does not say.
    """
    record = run.read()
    name = record["submitted"]["engine"]
    try:
        job = engine_of(record).jobs(record["submitted"].get("at")).get(str(record.get("submission")))
    except Refused as error:
        raise Refused(
            f"{name} does not answer here ({error}), and {run.name} was handed to it; go to where it does"
        ) from None
    return None if job is None or job.is_over else job


def stop(run: Run, now: bool, tell: Tell) -> tuple[int, str]:
    """Let it save and end, or take it out of the queue; return when its engine has done with it. As stopping.stop.

    Raises:
        Refused: the engine does not say how it stands, or is being given the run just now.
    """
    from train.launcher import stopping  # train ls has no need of what starts ranks
    from train.supervise import attempts

    with run.handing_over():  # not in the middle of it
        pass
    while (job := _job_of(run)) is not None:
        engine_of(run.read()).stop(run, job, now)
        time.sleep(_ASK_EVERY)
    run.clear_stop()
    record = status(run, tell)
    if record["state"] in (states.FINISHED, states.FAILED):
        return stopping.how_it_stands(record)
    lock = run.acquire(patience=_LAST)
    if lock is None:
        raise Refused(f"{run.name} is still alive though its job has ended; see: train show {run.name}")
    if run.read().get("stopped_by") != USER:
        saved = run.newest_checkpoint
        where = f"the last checkpoint is of step {saved}" if saved else "what it saved is where its nodes keep it"
        attempts.record_end(run, states.STOPPED, f"stopped (train stop); {where}", USER)
    lock.release()
    return stopping.how_it_stands(run.read_effective())


def resume(run: Run, flags: dict[str, str]) -> str:
    """Hand it to its engine again. Returns a line that says what became of it; '' where nothing is left to do.

    Raises:
        Refused: a value is wrong, it is there still, or the engine does not take it.
    """
    with run.handing_over():  # two at once would give it two jobs
        if status(run, lambda _: None)["state"] == states.FINISHED and not gives_more(flags):
            return ""
        if (job := _job_of(run)) is not None:
            raise Refused(f"{run.name} is at its engine already: {job.text}")
        content, path = engines.read(run.folder), run.folder / engines.FILE
        before = path.read_text(encoding="utf-8")
        lock = run.acquire()
        if lock is None:
            raise Refused(f"{run.name} is running; see: train show {run.name}")
        was = {name: run.read().get(name) for name in ("state", "reason", "stopped_by", "ended")}
        content["changes"] = merge_flags(content["changes"], flags)
        durable.write_atomically(path, json.dumps(content, indent=1) + "\n")
        run.update(state=states.CREATED, reason="being handed over", stopped_by=None, ended=None)
        lock.release()

        def undo() -> None:
            durable.write_atomically(path, before)
            run.update(lambda record: record.update(cast(Record, was)))

        return f"{_hand_over(run, undo)}; how it stands: train show {run.name}"


def merge_flags(fields: dict[str, str], flags: dict[str, str]) -> dict[str, str]:
    """Fields as text, and others that were given later over them; steps and epochs replace each other."""
    pairs = (("steps", "epochs"), ("eval.every_steps", "eval.every_epochs"))
    other = {name: other for pair in pairs for name, other in (pair, pair[::-1])}
    replaced = {other[name] for name, text in flags.items() if name in other and text != "none"}
    return {name: text for name, text in fields.items() if name not in replaced} | flags


@contextlib.contextmanager
def without_job(run: Run) -> Iterator[None]:
    """While this is held no engine has the run, nor gets it.

    Raises:
        Refused: one would still start it, or may, for all that is known here.
    """
    record = _record(run)
    if not is_submitted(record):
        yield
        return
    with run.handing_over():
        if record["state"] not in (states.FINISHED, states.FAILED) and (job := _job_of(run)) is not None:
            raise Refused(f"{run.name} is at its engine still: {job.text}; first: train stop {run.name}")
        yield


def remove_job(run: Run) -> str:
    """Let its engine remove what it keeps of a run that has ended. Returns a line about what stays; '' for nothing."""
    record = _record(run)
    if not is_submitted(record):
        return ""
    try:
        return engine_of(record).remove(run)
    except Refused:
        # there is no such engine where the folder was copied to
        if record["state"] in (states.FINISHED, states.FAILED):
            return ""
        raise


def _record(run: Run) -> Record:
    with contextlib.suppress(Refused):  # damaged: to be removed all the same
        return run.read()
    return cast(Record, {})


def other_nodes(run: Run) -> list[Run]:
    """The same run in the folders of its other nodes."""
    found = engines.other_node_folders(run.folder.parent, run.name)
    return [Run(folder) for folder in found if (folder / "run.json").exists()]

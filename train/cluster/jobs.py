"""Submit, watch, stop, resume and remove runs that the engine of a cluster starts.

The run folder has the state of the run, and the engine has the state of its job. `with_job_status` combines the two.
What depends on the machine is checked on the node, because a login node has no GPU and other cores. So is a file that
--init names. Only `submit` imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from ..errors import Refused
from ..launcher.resumable import gives_more
from ..run import durable, folders, states
from ..run.record import Record
from ..run.run_folder import Run
from ..signals import USER
from . import engine as engines
from .engine import Engine, JobStatus, Submission, engine

_ASK_EVERY = 0.5
"""Seconds between two checks whether a stopping job has ended."""
_LAST = 10.0
"""Seconds that the processes of a run may live on after its job has ended."""

Tell = Callable[[str], None]
"""Shows a line to the user."""
_Jobs = Mapping[str, JobStatus]


def is_submitted(record: Record) -> bool:
    """Return whether only an engine starts this run."""
    taken = record.get("submitted")
    return isinstance(taken, dict) and taken.get("engine") in engines.ENGINES and bool(record.get("submission"))


def engine_of(record: Record) -> Engine:
    return engine(record["submitted"]["engine"])


def submit(asked: Submission) -> str:
    """Check a request, create the run folder and hand it to the engine.

    Returns:
        A line about the job; with `is_dry` the text that the engine would get.

    Raises:
        Refused: something is wrong with the request, or the engine refused it. The run folder is removed again.
    """
    taker = engine(asked.engine)
    taker.check(asked)
    files, record = _prepared(asked)
    if asked.is_dry:
        return taker.render(asked)
    submitted = {"engine": asked.engine, "at": taker.place(asked)}
    record |= {"submission": asked.id, "submitted": submitted, "reason": f"being submitted to {asked.engine}"}
    run = folders.create(asked.runs, asked.name, files=files | {taker.SCRIPT: taker.render(asked)}, record=record)
    with run.handing_over():
        message = _hand_over(run, lambda: folders.remove(run))
    return f"{asked.engine}: {message}, from {run.folder / taker.SCRIPT}; see its state: train show {asked.name}"


def _prepared(asked: Submission) -> tuple[dict[str, str | bytes], dict[str, Any]]:
    """Check task, fields and sizes. Returns the files that every node reads, and values for run.json."""
    from ..launcher.checks import cut_batch
    from ..launcher.request import Request, resolve

    task, config = resolve(Request(task=asked.task, flags=asked.flags, config_file=asked.config_file))
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
        "changes": {},  # fields that a resume changes
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
    """Hand a run to its engine. Returns a short text about the job, even if the engine's answer was lost.

    Args:
        undo: called if the engine has no such job afterwards.
    """
    record = run.read()
    taker, name = engine_of(record), record["submitted"]["engine"]
    try:
        message = taker.submit(run, record)
    except BaseException as error:
        try:
            job = taker.jobs(record["submitted"]["at"]).get(record["submission"])
            if job is None or not isinstance(error, Refused):  # or Ctrl-C
                taker.remove(record)
        except Refused as silence:
            problem = f"{error}; whether {name} has {run.name} is not known ({silence})"
            run.note(reason=problem)
            raise Refused(f"{problem}; when it answers again: train resume {run.name}") from None
        if job is None or not isinstance(error, Refused):
            undo()
            raise
        message = job.text

    def change(record: Record) -> None:
        if record["state"] == states.CREATED and not run.alive():  # it may already run
            record["reason"] = f"submitted to {name}: {message}"

    run.update(change)
    return message


def statuses(runs: Iterable[Run], tell: Tell) -> Iterator[tuple[Run, Record]]:
    """Yield runs with their records and effective states. Each place of an engine is asked at most once.

    Args:
        tell: called with a line for each engine that does not answer and each record that cannot be read.
    """
    answers: dict[tuple[str, str | None], _Jobs | None] = {}
    for run in runs:
        try:
            record = _status(run, answers, tell)
        except Refused as error:
            tell(str(error))
        else:
            yield run, record


def status(run: Run, tell: Tell) -> Record:
    """Return a run's record with its effective state, including the engine's view.

    Raises:
        Refused: the record cannot be read.
    """
    return _status(run, {}, tell)


def _status(run: Run, answers: dict[Any, _Jobs | None], tell: Tell) -> Record:
    """Return the same, with what engines have answered so far."""
    record = run.read_effective(of_any_format=True)
    if not is_submitted(record) or record["state"] in (states.FINISHED, states.FAILED):
        return record
    at = record["submitted"]["engine"], record["submitted"].get("at")
    if at not in answers:
        answers[at] = _answer(record, tell)
    return with_job_status(record, answers[at])


def _answer(record: Record, tell: Tell) -> _Jobs | None:
    """Return the jobs of an engine; None: it does not answer."""
    try:
        return engine_of(record).jobs(record["submitted"].get("at"))
    except Refused as error:
        tell(f"{record['submitted']['engine']} does not answer here ({error}); shown is the state in the run folder")
        return None


def with_job_status(record: Record, jobs: _Jobs | None) -> Record:
    """Return a record with its effective state.

    Args:
        jobs: the jobs of its engine; None: the engine does not answer, so only the folder counts.
    """
    state = record["state"]
    if jobs is None:
        return record | {"state": states.QUEUED} if state == states.CREATED else record
    job = jobs.get(str(record.get("submission")))
    if job is None and state == states.CREATED:
        reason = f"its job is gone; submit it again: train resume {record['name']}"
        return record | {"state": states.INTERRUPTED, "reason": reason}
    if job is None or state in (states.FINISHED, states.FAILED):
        return record
    if job.state == states.RUNNING and state in (states.RUNNING, states.STOPPED):
        return record  # the folder knows more
    return record | {"state": job.state, "reason": f"{record['submitted']['engine']}: {job.text}"}


def poll(run: Run, tell: Tell) -> tuple[Record, bool]:
    """Return a run's effective record, and whether it has ended for good."""
    record = run.read_effective()
    jobs: _Jobs | None = None
    if record["state"] not in (states.RUNNING, states.FINISHED, states.FAILED):
        jobs = _answer(record, tell)
        record = run.read_effective()  # after the question: when the job is gone, the record is final
    if record["state"] in (states.RUNNING, states.FINISHED, states.FAILED):
        return record, record["state"] != states.RUNNING
    job = (jobs or {}).get(record["submission"])
    return with_job_status(record, jobs), jobs is not None and (job is None or job.is_over)


def _job_of(record: Record) -> JobStatus | None:
    """Return the job of a submitted run; None: the engine has none that is still active.

    Raises:
        Refused: the engine does not answer.
    """
    name = record["submitted"]["engine"]
    try:
        job = engine_of(record).jobs(record["submitted"].get("at")).get(str(record.get("submission")))
    except Refused as error:
        raise Refused(
            f"{name} does not answer here ({error}), and {record['name']} was submitted to it; go to where it does"
        ) from None
    return None if job is None or job.is_over else job


def check_answers(record: Record) -> None:
    """Raise Refused if the engine of a submitted run does not answer, unless the run has ended for good."""
    if record["state"] not in (states.FINISHED, states.FAILED):
        _job_of(record)


def stop(run: Run, now: bool, tell: Tell) -> tuple[int, str]:
    """Let a run save and end, or take it out of the queue. Waits until its job is over; returns as stopping.stop.

    Raises:
        Refused: the engine does not answer, or another process is submitting the run.
    """
    from ..launcher import stopping  # train ls does not need what starts ranks
    from ..supervise import attempts

    with run.handing_over():  # wait until a submission is complete
        pass
    while (job := _job_of(record := run.read())) is not None:
        engine_of(record).stop(run, record, job, now)
        time.sleep(_ASK_EVERY)
    run.clear_stop()
    record = status(run, tell)
    if record["state"] in (states.FINISHED, states.FAILED):
        return stopping.how_it_stands(record)
    lock = run.acquire(patience=_LAST)
    if lock is None:
        raise Refused(f"{run.name} is still alive, but its job has ended; see: train show {run.name}")
    if run.read().get("stopped_by") != USER:
        saved = run.newest_checkpoint
        where = f"the last checkpoint is of step {saved}" if saved else "its checkpoints are where its nodes keep them"
        attempts.record_end(run, states.STOPPED, reason=f"stopped (train stop); {where}", by=USER)
    lock.release()
    return stopping.how_it_stands(run.read_effective())


def resume(run: Run, flags: dict[str, str]) -> str:
    """Submit a run again. Returns a line about its job; '' if the run has finished.

    Raises:
        Refused: a value is wrong, the engine still has the run, or the engine refuses it.
    """
    with run.handing_over():  # two resumes at once would make two jobs
        if status(run, lambda _: None)["state"] == states.FINISHED and not gives_more(flags):
            return ""
        if (job := _job_of(run.read())) is not None:
            raise Refused(f"{run.name} already has a job: {job.text}; first: train stop {run.name}")
        content, path = engines.read(run.folder), run.folder / engines.FILE
        before = path.read_text(encoding="utf-8")
        lock = run.acquire()
        if lock is None:
            raise Refused(f"{run.name} is running; see: train show {run.name}")
        record = run.read()  # with the lock: its last process may have written its end since
        was = {name: record.get(name) for name in ("state", "reason", "stopped_by", "ended")}
        content["changes"] = merge_flags(content["changes"], flags)
        durable.write_atomically(path, json.dumps(content, indent=1) + "\n")
        run.update(state=states.CREATED, reason="being submitted", stopped_by=None, ended=None)
        lock.release()

        def undo() -> None:
            durable.write_atomically(path, before)
            run.update(lambda record: record.update(cast(Record, was)))

        return f"{_hand_over(run, undo)}; see its state: train show {run.name}"


def merge_flags(fields: dict[str, str], flags: dict[str, str]) -> dict[str, str]:
    """Return fields as text, with later ones over them. Steps and epochs replace each other."""
    pairs = (("steps", "epochs"), ("eval.every_steps", "eval.every_epochs"))
    other = {name: other for pair in pairs for name, other in (pair, pair[::-1])}
    replaced = {other[name] for name, text in flags.items() if name in other and text != "none"}
    return {name: text for name, text in fields.items() if name not in replaced} | flags


@contextlib.contextmanager
def without_job(run: Run) -> Iterator[None]:
    """Context manager during which no engine has the run or gets it.

    Raises:
        Refused: an engine still has the run, or does not answer.
    """
    record = _record(run)
    if not is_submitted(record):
        yield
        return
    with run.handing_over():
        if record["state"] not in (states.FINISHED, states.FAILED) and (job := _job_of(record)) is not None:
            raise Refused(f"{run.name} still has a job: {job.text}; first: train stop {run.name}")
        yield


def remove_job(run: Run) -> str:
    """Let the engine remove what it keeps of an ended run. Returns a line about what stays, or ''."""
    record = _record(run)
    if not is_submitted(record):
        return ""
    try:
        return engine_of(record).remove(record)
    except Refused:
        # the folder may have been copied to a machine without this engine
        if record["state"] in (states.FINISHED, states.FAILED):
            return ""
        raise


def _record(run: Run) -> Record:
    with contextlib.suppress(Refused):  # a damaged run can be removed too
        return run.read()
    return cast(Record, {})


def other_nodes(run: Run) -> list[Run]:
    """Return the same run in the folders of its other nodes."""
    found = engines.other_node_folders(run.folder.parent, run.name)
    return [Run(folder) for folder in found if (folder / "run.json").exists()]

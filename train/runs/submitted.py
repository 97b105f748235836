"""What a user does to a run that was handed to an engine of a cluster: stop it, go on, read it, remove it. No torch."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

from train.cluster.engines import engine
from train.cluster.submission import FILE, Engine, Standing, Unanswered, of_others, to_json
from train.errors import EXIT_FINISHED, Refused
from train.record import durable, store
from train.record.store import Run
from train.runs import followed, logs, supervise
from train.runs.standing import LOOK_EVERY, Tell, is_far, is_submitted, of_job, shown, words_of
from train.signals import USER


def _engine_of(record: dict[str, Any]) -> Engine:
    return engine(record["submitted"]["engine"])


def _standing(run: Run) -> Standing | None:
    """How its job stands; of_job. Where that is gone it may have another, which nobody has heard of: that is then its
    job, on record too.

    Raises:
        Refused: the engine does not say.
    """
    record = run.read()
    standing = of_job(record)
    if standing is None or standing.ended is not None:
        _engine_of(record).adopt(run)
        standing = of_job(run.read())
    return standing


def stop(run: Run, now: bool, tell: Tell) -> None:
    """Let it save and end, or take it out of the queue; return when the engine has done with it.

    Raises:
        Refused: the engine does not say how it stands, or is being given the run just now.
    """
    run.check_not_handed_over()
    standing = _standing(run)
    record = run.read()
    while standing is not None and standing.ended is None:
        _engine_of(record).halt(run, standing, now)
        time.sleep(LOOK_EVERY)
        standing = of_job(record)
    run.clear_stop()
    if shown(run, tell)["state"] in (store.FINISHED, store.FAILED):
        return
    lock = run.acquire()
    if lock is None:
        raise Refused(f"{run.name} is still alive though its job has ended; see: train show {run.name}")
    if run.read().get("stopped_by") != USER:
        saved = next(iter(run.steps_saved()), 0)
        where = "its checkpoints are in the cluster" if is_far(record) else f"the last checkpoint is of step {saved}"
        supervise.rest(run, store.STOPPED, f"stopped (train stop); {where}", USER)
    lock.release()


def resume(run: Run, flags: dict[str, str]) -> str:
    """Hand it to its engine again. Returns a line that says what became of it.

    Raises:
        Refused: a value is wrong, it is there still, or the engine does not take it.
    """
    from train import config

    config.check_flags(flags)  # what is handed over once stays, until it is given anew
    with run.handing_over():  # two at once would give it two jobs
        return _resume(run, flags)


def _resume(run: Run, flags: dict[str, str]) -> str:
    standing = _standing(run)
    record = run.read()
    if standing is not None and standing.ended is None:
        raise Refused(f"{run.name} is {words_of(record)} ({standing.words}) already")
    path = run.folder / FILE
    before = path.read_text(encoding="utf-8")
    try:
        content = json.loads(before)
        problem = not isinstance(content, dict)
    except (ValueError, RecursionError):
        problem = True
    if problem:
        raise Refused(f"{path} is damaged; restore it, or submit the run anew under another name")
    if flags:  # which nodes have a record that fields change, and which begin with what they are given, nodes know
        content |= {key: laid_over(content.get(key, {}), flags) for key in ("flags", "changes")}
    lock = run.acquire()
    if lock is None:
        raise Refused(f"{run.name} is running; see: train show {run.name}")
    was: dict[str, Any] = {name: record.get(name) for name in ("state", "reason", "stopped_by", "ended")}
    durable.write_atomically(path, to_json(content))
    run.update(state=store.CREATED, reason="being handed over", stopped_by=None, ended=None)
    lock.release()
    try:
        _engine_of(record).again(run)
    except Unanswered as error:
        run.note(reason=str(error))
        raise
    except BaseException:
        durable.write_atomically(path, before)
        run.update(**was)
        raise
    return f"{words_of(run.read())}; how it stands: train show {run.name}"


def laid_over(fields: dict[str, str], flags: dict[str, str]) -> dict[str, str]:
    """Fields as text, and others that were given later over them; steps and epochs replace each other."""
    other = {"steps": "epochs", "epochs": "steps"}
    replaced = {other[name] for name, text in flags.items() if name in other and text != "none"}
    return {name: text for name, text in fields.items() if name not in replaced} | flags


def not_handed_over(run: Run) -> contextlib.AbstractContextManager[None]:
    """While this is held, nobody hands the run to its engine. Raises Refused: somebody does just now."""
    return run.handing_over() if is_submitted(_record(run)) else contextlib.nullcontext()


def check_gone(run: Run) -> None:
    """Raises Refused: an engine would still start the run, or may, for all that is known here.

    Its engine has to say so, unless the run has ended for good by its folder. Of one that is kept in the cluster the
    folder knows too little for that.
    """
    record = _record(run)
    if not is_submitted(record):
        return
    try:
        standing = _standing(run)
    except Refused:
        if is_far(record) or not _has_ended(record):
            raise
        return
    if standing is not None and standing.ended is None:
        raise Refused(f"{run.name} is {words_of(run.read())} still; first: train stop {run.name}")


def _has_ended(record: dict[str, Any]) -> bool:
    """Whether no engine starts the run again, whatever it has in its queue: by the folder."""
    state = record["state"]
    return state in (store.FINISHED, store.FAILED) or (state == store.STOPPED and record["stopped_by"] == USER)


def forget(run: Run) -> str:
    """Let its engine remove what it keeps of a run that has ended. Returns a line about what stays; '' for nothing."""
    record = _record(run)
    return _engine_of(record).forget(run) if is_submitted(record) else ""


def _record(run: Run) -> dict[str, Any]:
    record: dict[str, Any] = {}
    with contextlib.suppress(Refused):  # damaged: to be removed all the same
        record = run.read()
    return record


def print_log(run: Run, rank: int, attempt: int | None, go_on: bool) -> int:
    """Print the output of a rank, wherever it is kept; see logs.print_log.

    Raises:
        Refused: there is no such attempt or rank.
    """
    record = run.read()
    if is_far(record):
        if attempt is not None:
            raise Refused(
                f"--attempt: of {run.name}, {record['submitted']['engine']} has what the last pod of a node said; "
                "leave it out"
            )
        if go_on:
            return followed.follow(run, rank)
        _engine_of(record).print_log(run, rank)
        return EXIT_FINISHED
    if go_on and is_submitted(record):
        followed.wait_for_start(run)
    return logs.print_log(of_rank(run, rank), rank, attempt, go_on)


def of_rank(run: Run, rank: int) -> Run:
    """The folder with the logs of that rank: its node's."""
    name = f"logs/attempt-*/rank{rank}.log"
    found = [one for one in (run, *others(run)) if any(one.folder.glob(name))]
    return found[0] if found else run


def others(run: Run) -> list[Run]:
    """The same run in the folders of its other nodes."""
    folders = of_others(run.folder.parent, run.name)
    return [Run(folder) for folder in folders if (folder / "run.json").exists()]

"""From an order to an open run: checked, created or found again, its lock held. For the process inside tmux."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from train.errors import Refused
from train.record import environment, store
from train.record.store import Lock, Run
from train.runs import control, scripts
from train.runs.gpus import count_ranks
from train.runs.launch import Order, session_of
from train.runs.supervise import MAX_RESTARTS
from train.runs.verdict import CODES


def open_run(order: Order, kept: environment.Kept) -> tuple[Run, Lock, int, list[str]]:
    """Check the order, create or find its run, take the lock.

    Returns the run, its lock, how many ranks it has, and warnings.

    Raises:
        Refused: it cannot be carried out; nothing has been created or changed.
    """
    runs = Path(order.runs)
    if order.kind == "resume":
        return _reopen(order, store.find(runs, order.name), kept)
    on_cpu = order.request.get("flags", {}).get("device") == "cpu"
    ranks, visible = count_ranks(order.nproc, order.gpus, on_cpu)
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    extra = {
        "tmux_session": session_of(order.name),
        "world_size": ranks,
        "gpus": visible,
        "max_restarts": MAX_RESTARTS if order.max_restarts is None else order.max_restarts,
    }
    if order.kind == "script":
        from train.runs.admit import versions

        text, record = scripts.taken(Path(order.script[0]))
        record |= {"script_arguments": order.script[1:], "cwd": os.getcwd(), "versions": versions()}
        record["watch"] = _watch_flags(order.flags)
        files: dict[str, str | bytes] = {scripts.COPY: text, environment.FILE: environment.to_json(kept)}
        _outlive_terminal()
        run = store.create(runs, order.name, files, record | extra)
    else:
        from train.runs.admit import Request, prepare

        prepared = prepare(Request(**order.request, ranks=ranks))
        _outlive_terminal()
        files = prepared.files | {environment.FILE: environment.to_json(kept)}
        run = store.create(runs, order.name, files, prepared.record | extra)
    lock = run.acquire()
    if lock is None:
        raise Refused(f"{run.name} is running already")
    return run, lock, ranks, kept.said


def _watch_flags(flags: dict[str, str]) -> dict[str, Any]:
    """The limits of a script's run, as `--watch.NAME VALUE` gives them.

    Raises:
        Refused: another field, or no such value.
    """
    from train import config

    for name in flags:
        if not name.startswith("watch."):
            raise Refused(f"--{name}: a script has no configuration fields but watch.*")
    known = config.fields()
    return {
        name.removeprefix("watch."): config.parse_value(name, known[name].annotation, text)
        for name, text in flags.items()
    }


def _reopen(order: Order, run: Run, kept: environment.Kept) -> tuple[Run, Lock, int, list[str]]:
    lock = run.acquire(patience=10.0 if run.read().get("state") in CODES else 1.0)
    if lock is None:
        raise Refused(f"{run.name} is running; see: train show {run.name}")
    try:
        record = run.read()
        if order.by_keeper:
            _check_still_wanted(run, record)
        ranks, visible = _ranks_again(order, record)
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
        here = Path.cwd()
        if record.get("cwd") and Path(record["cwd"]).is_dir():
            os.chdir(record["cwd"])
        changes: dict[str, Any] = {"world_size": ranks, "gpus": visible, "tmux_session": session_of(run.name)}
        if record.get("script"):
            more, warnings = _script_again(order, run, record, here)
            changes |= more
        else:
            warnings = _task_again(order, run, ranks)
        if not order.by_keeper:  # what holds from now on, for the keeper too
            kept = environment.after(environment.read(run.folder), kept)
            store.write_atomically(run.folder / environment.FILE, environment.to_json(kept))
        changes["kept"] = control.count_of(run, record) if order.by_keeper else None
        if order.max_restarts is not None:
            changes["max_restarts"] = order.max_restarts
        run.update(**changes, reason="", stopped_by=None, ended=None, state=store.CREATED)
        return run, lock, ranks, warnings
    except BaseException:
        lock.release()
        raise


def _ranks_again(order: Order, record: dict[str, Any]) -> tuple[int, str | None]:
    """How many ranks go on, and the GPUs they may see: as before, where nothing else is asked for."""
    nproc = order.nproc or (str(record["world_size"]) if order.gpus is None else None)
    ranks, visible = count_ranks(nproc, order.gpus)
    if visible is None and order.gpus is None and order.nproc is None and record.get("gpus"):
        visible = record["gpus"]
    return ranks, visible


def _task_again(order: Order, run: Run, ranks: int) -> list[str]:
    """Check that a task's run can go on, and write its changes down. Returns warnings."""
    from train.runs.admit import apply_resume, prepare_resume

    if order.script:
        raise Refused(f"--script is for runs of scripts; {run.name} trains a task, and goes on with its own copy")
    _, config, warnings = prepare_resume(run, order.flags, ranks)
    _outlive_terminal()
    if order.flags:
        apply_resume(run, config)
    return warnings


def _script_again(order: Order, run: Run, record: dict[str, Any], here: Path) -> tuple[dict[str, Any], list[str]]:
    """What changes of a script's run that goes on, and warnings."""
    changes = {"watch": (record.get("watch") or {}) | _watch_flags(order.flags)}
    _outlive_terminal()
    if order.script:
        return changes | scripts.replace(run, here / order.script[0]), []
    return changes, scripts.warnings(run, record)


def _check_still_wanted(run: Run, record: dict[str, Any]) -> None:
    """What the keeper saw may have changed until the lock was held: stopped by its user, resumed and finished."""
    if record["state"] in (store.FINISHED, store.FAILED):
        raise Refused(f"{run.name} is {record['state']}")
    if record["state"] == store.STOPPED and not control.rests_by_itself(record):
        raise Refused(f"{run.name} was stopped by its user")


def _outlive_terminal() -> None:
    """From here on the terminal may go; the run stays. Before it, ending the session ends a launch that is withdrawn
    while nothing has been created yet."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

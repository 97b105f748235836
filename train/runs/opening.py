"""From an order to an open run: checked, created or found again, its lock held. For the process inside tmux."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from train import hashing
from train.errors import Refused
from train.gpus import VISIBLE, seen_here
from train.record import durable, environment, folders, station, store
from train.record.record import Record
from train.record.store import Lock, Run
from train.runs import control, gpus, provenance, scripts
from train.runs.launch import Order, session_of
from train.supervise import address
from train.supervise.attempts import MAX_RESTARTS
from train.supervise.decide import CODES
from train.supervise.forks import CHECKS, RANKS, SCRIPT, Zygote, acquire


@dataclasses.dataclass
class Opened:
    """A run that is to begin."""

    run: Run
    lock: Lock
    ranks: int
    """On this machine."""
    zygote: Zygote
    warnings: list[str]
    listening: socket.socket | None = None
    """On node 0 of several: where the others come to."""


def open_run(order: Order, kept: environment.Kept, begun: Mapping[str, str] | None = None) -> Opened:
    """Check the order, create or find its run, take the lock. The zygote of its ranks imports meanwhile.

    Args:
        begun: the zygote that was begun for it; see forks.Begun.

    Raises:
        Refused: it cannot be carried out; nothing has been created or changed.
        CheckFailed: the same, for a reason that is not foreseen.
    """
    runs = Path(order.runs)
    if order.kind == "resume":
        return _reopen(order, folders.find(runs, order.name), kept, begun)
    zygote = zygote_for(order.kind == "script", begun)
    check = check_script if order.kind == "script" else check_new
    ranks, visible, files, record = _checked(zygote, check, order)
    gpus.see(visible)
    listening = _listen(order.cluster)
    record |= {
        "cluster": order.cluster or None,
        "submission": order.submission,
        "nproc": ranks,
        "tmux_session": session_of(order.name),
        "world_size": record.get("world_size") or ranks,
        "gpus": visible,
        "max_restarts": MAX_RESTARTS if order.max_restarts is None else order.max_restarts,
    }
    _outlive_terminal()
    files[environment.FILE] = environment.to_json(kept)
    run = Run(runs / order.name) if order.queued else folders.create(runs, order.name, files, record)
    lock = run.acquire()
    if lock is None:
        raise Refused(f"{run.name} is running already")
    if order.queued:
        folders.fill(run, files, record | {"host": socket.gethostname(), "reason": ""})
    return Opened(run, lock, ranks, zygote, kept.said, listening)


def zygote_for(is_script: bool, begun: Mapping[str, str] | None = None) -> Zygote:
    """A zygote for a run in this folder and environment."""
    return acquire(hashing.fixed(os.environ), SCRIPT if is_script else (*CHECKS, *RANKS), begun)


def _checked(zygote: Zygote, check: Callable[..., Any], order: Order) -> Any:
    """What a check below returns, made in a fork: what a task's own code does there is not done here."""
    after = SCRIPT[-1] if order.kind == "script" else CHECKS[-1]
    return zygote.call(f"{__name__}:{check.__name__}", dataclasses.asdict(order), after=after)


def check_script(given: dict[str, Any]) -> tuple[int, str | None, dict[str, str | bytes], dict[str, Any]]:
    """Check a new run of a script, as `check_new`."""
    order = Order(**given)
    ranks, visible = gpus.count_ranks(order.nproc, order.gpus)
    if visible is not None:
        gpus.see(visible)  # before the cards are looked at
    text, record = scripts.taken(Path(order.script[0]))
    record |= {"script_arguments": order.script[1:], "cwd": os.getcwd(), "versions": provenance.versions(seen_here())}
    record["watch"] = _watch_flags(order.flags)
    return ranks, os.environ.get(VISIBLE), {scripts.COPY: text}, record


def check_new(given: dict[str, Any]) -> tuple[int, str | None, dict[str, str | bytes], dict[str, Any]]:
    """Check a new run of a task. Returns its ranks, the GPUs they may see, and what to create its folder with."""
    from train.runs.checks import prepare
    from train.runs.request import Request

    order = Order(**given)
    on_cpu = order.request.get("flags", {}).get("device") == "cpu"
    ranks, visible = gpus.count_ranks(order.nproc, order.gpus, on_cpu)
    if visible is not None:
        gpus.see(visible)
    prepared = prepare(Request(**order.request, ranks=ranks, nodes=_nodes(order.cluster)))
    return ranks, os.environ.get(VISIBLE), prepared.files, prepared.record


def _nodes(cluster: Mapping[str, Any] | None) -> range:
    """How many machines there may be at a time."""
    return range(cluster["least"], cluster["most"] + 1) if cluster else range(1, 2)


def _listen(cluster: Mapping[str, Any] | None) -> socket.socket | None:
    """On node 0: open the place where the others come to. Raises Refused if it is taken."""
    if not cluster or cluster["node"]:
        return None
    return address.listen(address.parse(cluster["rendezvous"]))


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


def _reopen(order: Order, run: Run, kept: environment.Kept, begun: Mapping[str, str] | None) -> Opened:
    lock = run.acquire(patience=10.0 if run.read().get("state") in CODES else 1.0)
    if lock is None:
        raise Refused(f"{run.name} is running; see: train show {run.name}")
    try:
        record = run.read()
        if order.by_keeper:
            _check_still_wanted(run, record)
        here = Path.cwd()
        if record.get("cwd") and Path(record["cwd"]).is_dir():
            os.chdir(record["cwd"])
        zygote = zygote_for(bool(record.get("script")), begun)
        changes: dict[str, Any] = {"tmux_session": session_of(run.name)}
        if record.get("script"):
            changes["watch"] = (record.get("watch") or {}) | _watch_flags(order.flags)
            ranks, visible = zygote.call(f"{__name__}:ranks_again", dataclasses.asdict(order), after=SCRIPT[-1])
            content, warnings = "", [] if order.script else scripts.warnings(run, record)
        else:
            ranks, visible, content, warnings = _checked(zygote, check_again, order)
        _outlive_terminal()
        gpus.see(visible)
        cluster = record.get("cluster") if order.cluster is None else order.cluster or None
        listening = _listen(cluster)
        changes |= {"world_size": ranks * _nodes(cluster)[-1], "nproc": ranks, "gpus": visible, "cluster": cluster}
        changes["kept"] = control.count_of(run, record) if order.by_keeper else None
        if order.max_restarts is not None:
            changes["max_restarts"] = order.max_restarts
        with _together(run, "config.toml", scripts.COPY, environment.FILE):
            if record.get("script") and order.script:
                changes |= scripts.replace(run, here / order.script[0])
            elif order.flags and not record.get("script"):
                durable.write_atomically(run.folder / "config.toml", content)
            if not order.by_keeper:  # what holds from now on, for the keeper too
                kept = environment.after(environment.read(run.folder), kept)
                durable.write_atomically(run.folder / environment.FILE, environment.to_json(kept))
                changes |= station.mark(run.folder, {**record, **changes})  # after the files: a kill leaves a copy
            # nobody is to take the process ids of the attempt before for those of the next
            changes |= {"reason": "", "stopped_by": None, "ended": None, "pids": {}, "state": store.CREATED}
            run.update(lambda record: record.pop("refused", None), **changes)
        return Opened(run, lock, ranks, zygote, warnings, listening)
    except BaseException:
        lock.release()
        raise


@contextlib.contextmanager
def _together(run: Run, *names: str) -> Iterator[None]:
    """These files of a run change with its record, or not at all: copies of them are put back where something fails."""
    copies = {run.folder / name: run.folder / f".{name}.before" for name in names if (run.folder / name).is_file()}
    try:
        for file, copy in copies.items():
            shutil.copy2(file, copy)
        try:
            yield
        except BaseException:
            for file, copy in copies.items():
                with contextlib.suppress(OSError):
                    copy.replace(file)
            raise
    finally:
        for copy in copies.values():
            with contextlib.suppress(OSError):
                copy.unlink(missing_ok=True)


def ranks_again(given: dict[str, Any]) -> tuple[int, str | None]:
    """How many ranks go on, and the GPUs that they see, which this process then sees too: `gpus.again` chooses them."""
    order = Order(**given)
    run = Run(Path(order.runs) / order.name)
    before, record = environment.read(run.folder), run.read()
    kept = before.values.get(VISIBLE) if before is not None else None
    current = os.environ.get(VISIBLE)
    gpus.see(gpus.again(order.gpus is not None, order.visible, kept, record.get("gpus"), current))
    nproc = order.nproc or (str(record.get("nproc") or record["world_size"]) if order.gpus is None else None)
    ranks, visible = gpus.count_ranks(nproc, order.gpus)
    if visible is not None:
        gpus.see(visible)
    return ranks, os.environ.get(VISIBLE)


def check_again(given: dict[str, Any]) -> tuple[int, str | None, str, list[str]]:
    """Check that a task's run can go on. Returns its ranks, their GPUs, its configuration as TOML, and warnings."""
    from train import config as configuration
    from train.runs.checks import prepare_resume

    order = Order(**given)
    run = Run(Path(order.runs) / order.name)
    if order.script:
        raise Refused(f"--script is for runs of scripts; {run.name} trains a task, and goes on with its own copy")
    ranks, visible = ranks_again(given)
    cluster = run.read().get("cluster") if order.cluster is None else order.cluster
    _, config, warnings = prepare_resume(run, order.flags, ranks, _nodes(cluster))
    return ranks, visible, configuration.to_toml(config), warnings


def _check_still_wanted(run: Run, record: Record) -> None:
    """What the keeper saw may have changed until the lock was held: stopped by its user, resumed and finished."""
    if record.get("submitted"):
        raise Refused(f"{run.name} was handed to an engine, which starts it; its user goes on with: train resume")
    if record["state"] in (store.FINISHED, store.FAILED):
        raise Refused(f"{run.name} is {record['state']}")
    if record["state"] == store.STOPPED and not control.rests_by_itself(record):
        raise Refused(f"{run.name} was stopped by its user")
    if not station.has_started(run.folder, record):
        raise Refused(f"{run.name} is not known as started here; its user goes on with: train resume {run.name}")


def _outlive_terminal() -> None:
    """From here on the terminal may go; the run stays. Before it, ending the session ends a launch that is withdrawn
    while nothing has been created yet."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

"""From a launch request to an open run: checked, created or found again, its lock held. For the process inside tmux."""

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
from train.launcher import choose_gpus, control, provenance, script
from train.launcher.tmux import LaunchRequest, session_of
from train.run import durable, environment, folders, states, station
from train.run.record import Record
from train.run.run_folder import Lock, Run
from train.supervise import address
from train.supervise.attempts import MAX_RESTARTS
from train.supervise.decide import CODES
from train.supervise.forks import CHECKS, RANKS, SCRIPT, Zygote, acquire


@dataclasses.dataclass
class OpenedRun:
    """A run that is to begin."""

    run: Run
    lock: Lock
    ranks: int
    """On this machine."""
    zygote: Zygote
    warnings: list[str]
    listening: socket.socket | None = None
    """On node 0 of several: where the others come to."""


def open_run(launch: LaunchRequest, saved: environment.SavedEnvironment) -> OpenedRun:
    """Check the request, create or find its run, take the lock. The zygote of its ranks imports meanwhile.

    Raises:
        Refused: it cannot be carried out; nothing has been created or changed.
    """
    runs = Path(launch.runs)
    if launch.kind == "resume":
        return _reopen(launch, folders.find(runs, launch.name), saved)
    zygote = zygote_for(launch.kind == "script")
    check = check_script if launch.kind == "script" else check_new
    ranks, visible, files, record = _checked(zygote, check, launch)
    choose_gpus.see(visible)
    listening = _listen(launch.cluster)
    record |= {
        "cluster": launch.cluster or None,
        "submission": launch.submission,
        "nproc": ranks,
        "tmux_session": session_of(launch.name),
        "world_size": record.get("world_size") or ranks,
        "gpus": visible,
        "max_restarts": MAX_RESTARTS if launch.max_restarts is None else launch.max_restarts,
    }
    _outlive_terminal()
    files[environment.FILE] = environment.to_json(saved)
    run = Run(runs / launch.name) if launch.queued else folders.create(runs, launch.name, files, record)
    lock = run.acquire()
    if lock is None:
        raise Refused(f"{run.name} is running already")
    if launch.queued:
        folders.fill(run, files, record | {"host": socket.gethostname(), "reason": ""})
    return OpenedRun(run, lock, ranks, zygote, saved.warnings, listening)


def zygote_for(is_script: bool) -> Zygote:
    """A zygote for a run in this folder and environment."""
    return acquire(hashing.fixed(os.environ), SCRIPT if is_script else (*CHECKS, *RANKS))


def _checked(zygote: Zygote, check: Callable[..., Any], launch: LaunchRequest) -> Any:
    """What a check below returns, made in a fork: what a task's own code does there is not done here."""
    after = SCRIPT[-1] if launch.kind == "script" else CHECKS[-1]
    return zygote.call(f"{__name__}:{check.__name__}", dataclasses.asdict(launch), after=after)


def check_script(given: dict[str, Any]) -> tuple[int, str | None, dict[str, str | bytes], dict[str, Any]]:
    """Check a new run of a script, as `check_new`."""
    launch = LaunchRequest(**given)
    ranks, visible = choose_gpus.count_ranks(launch.nproc, launch.gpus)
    if visible is not None:
        choose_gpus.see(visible)  # before the cards are looked at
    text, record = script.taken(Path(launch.script[0]))
    record |= {"script_arguments": launch.script[1:], "cwd": os.getcwd(), "versions": provenance.versions(seen_here())}
    record["watch"] = _watch_flags(launch.flags)
    return ranks, os.environ.get(VISIBLE), {script.COPY: text}, record


def check_new(given: dict[str, Any]) -> tuple[int, str | None, dict[str, str | bytes], dict[str, Any]]:
    """Check a new run of a task. Returns its ranks, the GPUs they may see, and what to create its folder with."""
    from train.launcher.checks import prepare
    from train.launcher.request import Request

    launch = LaunchRequest(**given)
    on_cpu = launch.request.get("flags", {}).get("device") == "cpu"
    ranks, visible = choose_gpus.count_ranks(launch.nproc, launch.gpus, on_cpu)
    if visible is not None:
        choose_gpus.see(visible)
    prepared = prepare(Request(**launch.request, ranks=ranks, nodes=_nodes(launch.cluster)))
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


def _reopen(launch: LaunchRequest, run: Run, saved: environment.SavedEnvironment) -> OpenedRun:
    lock = run.acquire(patience=10.0 if run.read().get("state") in CODES else 1.0)
    if lock is None:
        raise Refused(f"{run.name} is running; see: train show {run.name}")
    try:
        record = run.read()
        if launch.by_keeper:
            _check_still_wanted(run, record)
        here = Path.cwd()
        if record.get("cwd") and Path(record["cwd"]).is_dir():
            os.chdir(record["cwd"])
        zygote = zygote_for(bool(record.get("script")))
        changes: dict[str, Any] = {"tmux_session": session_of(run.name)}
        if record.get("script"):
            changes["watch"] = (record.get("watch") or {}) | _watch_flags(launch.flags)
            ranks, visible = zygote.call(f"{__name__}:ranks_again", dataclasses.asdict(launch), after=SCRIPT[-1])
            content, warnings = "", [] if launch.script else script.warnings(run, record)
        else:
            ranks, visible, content, warnings = _checked(zygote, check_again, launch)
        _outlive_terminal()
        choose_gpus.see(visible)
        cluster = record.get("cluster") if launch.cluster is None else launch.cluster or None
        listening = _listen(cluster)
        changes |= {"world_size": ranks * _nodes(cluster)[-1], "nproc": ranks, "gpus": visible, "cluster": cluster}
        changes["kept"] = control.count_of(run, record) if launch.by_keeper else None
        if launch.max_restarts is not None:
            changes["max_restarts"] = launch.max_restarts
        with _together(run, "config.toml", script.COPY, environment.FILE):
            if record.get("script") and launch.script:
                changes |= script.replace(run, here / launch.script[0])
            elif launch.flags and not record.get("script"):
                durable.write_atomically(run.folder / "config.toml", content)
            if not launch.by_keeper:  # what holds from now on, for the keeper too
                saved = environment.after(environment.read(run.folder), saved)
                durable.write_atomically(run.folder / environment.FILE, environment.to_json(saved))
                changes |= station.mark(run.folder, {**record, **changes})  # after the files: a kill leaves a copy
            # nobody is to take the process ids of the attempt before for those of the next
            changes |= {"reason": "", "stopped_by": None, "ended": None, "pids": {}, "state": states.CREATED}
            run.update(lambda record: record.pop("refused", None), **changes)
        return OpenedRun(run, lock, ranks, zygote, warnings, listening)
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
    """How many ranks go on, and the GPUs that they see, which this process then sees too; see `choose_gpus.again`."""
    launch = LaunchRequest(**given)
    run = Run(Path(launch.runs) / launch.name)
    before, record = environment.read(run.folder), run.read()
    saved = before.values.get(VISIBLE) if before is not None else None
    current = os.environ.get(VISIBLE)
    choose_gpus.see(choose_gpus.again(launch.gpus is not None, launch.visible, saved, record.get("gpus"), current))
    nproc = launch.nproc or (str(record.get("nproc") or record["world_size"]) if launch.gpus is None else None)
    ranks, visible = choose_gpus.count_ranks(nproc, launch.gpus)
    if visible is not None:
        choose_gpus.see(visible)
    return ranks, os.environ.get(VISIBLE)


def check_again(given: dict[str, Any]) -> tuple[int, str | None, str, list[str]]:
    """Check that a task's run can go on. Returns its ranks, their GPUs, its configuration as TOML, and warnings."""
    from train import config as configuration
    from train.launcher.checks import prepare_resume

    launch = LaunchRequest(**given)
    run = Run(Path(launch.runs) / launch.name)
    if launch.script:
        raise Refused(f"--script is for runs of scripts; {run.name} trains a task, and goes on with its own copy")
    ranks, visible = ranks_again(given)
    cluster = run.read().get("cluster") if launch.cluster is None else launch.cluster
    _, config, warnings = prepare_resume(run, launch.flags, ranks, _nodes(cluster))
    return ranks, visible, configuration.to_toml(config), warnings


def _check_still_wanted(run: Run, record: Record) -> None:
    """What the keeper saw may have changed until the lock was held: stopped by its user, resumed and finished."""
    if record.get("submitted"):
        raise Refused(f"{run.name} was handed to an engine, which starts it; its user goes on with: train resume")
    if record["state"] in (states.FINISHED, states.FAILED):
        raise Refused(f"{run.name} is {record['state']}")
    if record["state"] == states.STOPPED and not control.rests_by_itself(record):
        raise Refused(f"{run.name} was stopped by its user")
    if not station.has_started(run.folder, record):
        raise Refused(f"{run.name} is not known as started here; its user goes on with: train resume {run.name}")


def _outlive_terminal() -> None:
    """From here on the terminal may go; the run stays. Before it, ending the session ends a launch that is withdrawn
    while nothing has been created yet."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

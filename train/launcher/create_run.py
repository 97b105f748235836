"""Turns a launch request into an open run: checked, created or found again, its lock held. Runs in the agent."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import caches, hash_seed, variables
from ..errors import Refused
from ..nodes import address
from ..run import copies, durable, environment, folders, imports, owner, ownership, states
from ..run.record import Record
from ..run.run_folder import Lock, Run
from ..supervise import attempts, programs
from ..supervise.decide import CODES
from ..supervise.programs import Program
from ..zygote.client import Zygote, acquire
from . import ranks_and_gpus, resumable, script
from .request import ALONE, LaunchRequest, Request
from .tmux import session_of


@dataclasses.dataclass
class OpenedRun:
    """A run that is ready to start."""

    run: Run
    lock: Lock
    ranks: int
    """Number of ranks on this machine."""
    zygote: Zygote
    warnings: list[str]
    listening: socket.socket | None = None
    """On node 0 of several machines: the socket to which the other nodes connect."""


@dataclasses.dataclass
class CheckedLaunch:
    """A launch request that has passed every check, for a new run or a resume."""

    ranks: int
    """Number of ranks on this machine."""
    visible: str | None
    """The GPUs that the ranks see, as in CUDA_VISIBLE_DEVICES; None: all."""
    files: dict[str, str | bytes]
    """Files to write into the run folder."""
    record: dict[str, Any]
    """Fields of run.json."""
    warnings: list[str]
    copies: dict[str, Path] = dataclasses.field(default_factory=dict)
    """Files to copy into the folder of a fork."""


def open_run(launch: LaunchRequest, environ: Mapping[str, str]) -> OpenedRun:
    """Check the request, create or find its run, take the lock. Meanwhile the zygote of the ranks imports torch.

    Args:
        environ: The environment of the launch, of which a part is kept with the run.

    Raises:
        Refused: the request cannot be carried out; nothing has been created or changed.
    """
    if launch.kind != "resume":
        return _create(launch, environ)
    run = folders.find(Path(launch.runs), launch.name)
    held = owner.opened(run)
    run = run if run.read().get("cluster") else held  # other machines know the run by its path
    lock = run.acquire(patience=10.0 if run.read().get("state") in CODES else 1.0)
    if lock is None:
        raise Refused(f"{run.name} is running; see: train show {run.name}")
    try:
        return _reopen(launch, run, lock, environ)
    except BaseException:
        lock.release()
        raise


def _create(launch: LaunchRequest, environ: Mapping[str, str]) -> OpenedRun:
    runs = Path(launch.runs)
    _check_variables(launch.cluster)
    of = owner.opened(folders.find(runs, launch.request["of"])) if launch.kind == "fork" else None
    if of is not None:
        folders.enter(of.read().get("cwd") or "")
    program = programs.SCRIPT if launch.kind == "script" else programs.TASK
    zygote, checked = check_in_fork(launch, program)
    if of is not None:  # copy from the folder that was checked, even if another folder has its name now
        checked.copies = {name: of.folder / path.relative_to(of.path) for name, path in checked.copies.items()}
    _outlive_terminal()
    ranks_and_gpus.see(checked.visible)
    listening = _listen(launch.cluster)
    restarts = program.default_restarts if launch.max_restarts is None else launch.max_restarts
    record = checked.record | _placement(launch, checked, _cluster_of(launch, None))
    record |= {"submission": launch.submission, "max_restarts": restarts}
    saved = environment.keep(environ, imports.python_files(record), launch.keep_env)
    files = checked.files | {environment.FILE: environment.to_json(saved)}
    run = (
        Run(runs / launch.name)
        if launch.queued
        else folders.create(runs, launch.name, files=files, record=record, copies=checked.copies)
    )
    lock = run.acquire()
    if lock is None:
        raise Refused(f"{run.name} is running; see: train show {run.name}")
    if launch.queued:
        for name, content in files.items():
            durable.write_atomically(run.folder / name, content)
        run.update(**record, host=socket.gethostname(), reason="")  # last: an incomplete folder is filled again
    return OpenedRun(run, lock, checked.ranks, zygote, [*saved.warnings, *checked.warnings], listening)


def _reopen(launch: LaunchRequest, run: Run, lock: Lock, environ: Mapping[str, str]) -> OpenedRun:
    record = run.read()
    copies.clear(run)
    kept = _check_still_wanted(run, record) if launch.by_keeper else None
    _check_variables(_cluster_of(launch, record))
    folders.enter(record.get("cwd") or "")
    zygote, checked = check_in_fork(launch, programs.of_record(record))
    _outlive_terminal()
    ranks_and_gpus.see(checked.visible)
    cluster = _cluster_of(launch, record)
    listening = _listen(cluster)
    changes = checked.record | _placement(launch, checked, cluster) | {"kept": kept}
    if launch.max_restarts is not None:
        changes["max_restarts"] = launch.max_restarts
    # the recorded process ids belong to the attempt before
    changes |= {"reason": "", "stopped_by": None, "ended": None, "pids": {}, "state": states.CREATED}
    files = checked.files
    if not launch.by_keeper:  # this environment holds from now on, for the keeper too
        before = environment.read(run.folder)
        sources = imports.python_files(record)
        saved = environment.kept_again(before, environ, sources=sources, names=launch.keep_env)
        files = {environment.FILE: environment.to_json(saved), **files}
    for name, content in files.items():
        durable.write_atomically(run.folder / name, content)
    if not launch.by_keeper:
        changes |= ownership.sign(
            run.path, {**record, **changes}
        )  # last: an interruption before it leaves the `copy` state
    run.update(lambda record: record.pop("refused", None), **changes)
    return OpenedRun(run, lock, checked.ranks, zygote, checked.warnings, listening)


def check_in_fork(launch: LaunchRequest, program: Program = programs.TASK) -> tuple[Zygote, CheckedLaunch]:
    """Check a request in a forked process, so that the task's own code has no effect on this process.

    Also returns the zygote from which that process and the run's ranks are forked.

    Raises:
        Refused: the request cannot be carried out.
    """
    variables.check_torch(os.environ)
    names, after = program.imports()
    zygote = acquire(hash_seed.with_seed(os.environ), names)
    return zygote, zygote.call(f"{__name__}:check", dataclasses.asdict(launch), after=after)


def check(given: dict[str, Any]) -> CheckedLaunch:
    """Check a launch request, given as a dict of its fields.

    Raises:
        Refused: the request cannot be carried out.
    """
    caches.provide()
    launch = LaunchRequest(**given)
    run = Run(Path(launch.runs) / launch.name) if launch.kind == "resume" else None
    record = run.read() if run is not None else None
    ranks, visible = ranks_and_gpus.choose(launch)
    if launch.kind == "script" or (record and programs.of_record(record) is programs.SCRIPT):
        return CheckedLaunch(ranks, visible, {}, *script.check(launch, run))
    nodes = _nodes(_cluster_of(launch, record))
    of_gloo = variables.keep_gloo_at_home(dict(os.environ)) if nodes == ALONE and ranks > 1 else ""
    more = [of_gloo] if of_gloo else []
    if run is not None:
        from .. import config as configuration
        from .resume import prepare_resume

        config, warnings = prepare_resume(run, launch.flags, ranks, nodes)
        files: dict[str, str | bytes] = {"config.toml": configuration.to_toml(config)} if launch.flags else {}
        warnings = [*more, *warnings]
        return CheckedLaunch(ranks, visible, files, {"warnings": warnings}, warnings)
    if launch.kind == "fork":
        from .fork import prepare_fork

        of, step = folders.find(Path(launch.runs), launch.request["of"]), launch.request["step"]
        prepared = prepare_fork(of, step, launch.flags, ranks)
    else:
        from .checks import prepare

        imports.watch()
        prepared = prepare(Request(**launch.request, ranks=ranks, nodes=nodes))
    warnings = [*more, *prepared.warnings]
    return CheckedLaunch(ranks, visible, prepared.files, prepared.record, warnings, prepared.copies)


def _cluster_of(launch: LaunchRequest, record: Record | None) -> Mapping[str, Any] | None:
    """Return the machines of a run as nodes.Settings, from the request, else from the record. None: one machine."""
    if launch.cluster is None and record is not None:
        return record.get("cluster")
    return launch.cluster or None


def _nodes(cluster: Mapping[str, Any] | None) -> range:
    """Return the possible numbers of machines."""
    return range(cluster["least"], cluster["most"] + 1) if cluster else ALONE


def _check_variables(cluster: Mapping[str, Any] | None) -> None:
    """Raise Refused for settings with which ranks on several machines could never connect to each other."""
    if cluster:
        place = address.parse(cluster["rendezvous"])
        variables.check_gloo(os.environ, address.interfaces(address.resolve(place), place.port, environ={})[0])


def _listen(cluster: Mapping[str, Any] | None) -> socket.socket | None:
    """On node 0: listen at the rendezvous address for the other nodes. Raises Refused if the port is in use."""
    if not cluster or cluster["node"]:
        return None
    return address.listen(address.parse(cluster["rendezvous"]))


def _placement(launch: LaunchRequest, checked: CheckedLaunch, cluster: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the fields of run.json about ranks, GPUs and machines."""
    return {
        "cluster": cluster,
        "nproc": checked.ranks,
        "world_size": checked.ranks * _nodes(cluster)[-1],
        "gpus": checked.visible,
        "tmux_session": session_of(launch.name),
    }


def _check_still_wanted(run: Run, record: Record) -> dict[str, int]:
    """Check, with the lock held, that the keeper should still resume this run: its user may have stopped it meanwhile.

    Returns the keeper's count. A run that the keeper has resumed too often is recorded as failed here.
    """
    if record.get("submitted"):
        raise Refused(f"{run.name} was submitted to a cluster; only its user resumes it: train resume {run.name}")
    if record["state"] in (states.FINISHED, states.FAILED):
        raise Refused(f"{run.name} is {record['state']}")
    if record["state"] == states.STOPPED and not states.rests_by_itself(record):
        raise Refused(f"{run.name} was stopped by its user")
    if not ownership.was_started_here(run.path, record):
        raise Refused(f"{run.name} counts as a copy; only its user resumes it: train resume {run.name}")
    if not resumable.keeper_may_start(record):
        raise Refused(f"{run.name} was launched without --max-restarts; only its user starts it again")
    count = resumable.keeper_count(run, record)
    if reason := resumable.why_given_up(record, count):
        attempts.record_end(run, states.FAILED, reason=reason)
        raise Refused(f"{reason}; the keeper does not resume it again")
    return count


def _outlive_terminal() -> None:
    """From now on the run survives the end of its terminal.

    Until then, ending the tmux session ends a withdrawn launch before anything is created.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

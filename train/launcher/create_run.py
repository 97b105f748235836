"""Turns a launch into an open run: checked, created or found again, its lock held. Runs in the agent."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .. import doing, hash_seed, programs, variables
from ..code import copies, imports
from ..errors import Refused
from ..leases.devices import Reservation
from ..nodes import address
from ..programs import Program
from ..run import durable, environment, folders, ownership, states, wandb_run
from ..run.record import Record
from ..run.run_folder import Lock, Run
from ..run.spec import read_spec
from ..signals import RUNG
from ..supervise import attempts
from ..supervise.decide import CODES
from ..zygote.client import Zygote, acquire
from . import leasing, notices, ranks_and_gpus, resumable
from .request import Launch, OpenedRun, Plan, numbers_of
from .tmux import session_of


def create(
    launch: Launch,
    program: Program,
    environ: Mapping[str, str],
    *,
    source: Run | None = None,
    existing: Run | None = None,
    fields: dict[str, Any] | None = None,
) -> OpenedRun:
    """Check a launch, create its run and take the lock. Meanwhile the zygote of the ranks imports torch.

    Args:
        environ: The environment of the launch, of which a part is kept with the run.
        source: The opened folder of the run that is forked.
        existing: A folder that was made when the run was submitted.
        fields: More fields of run.json.

    Raises:
        Refused: the launch is not possible; nothing has been created or changed.
    """
    runs = Path(launch.runs)
    _check_variables(launch.machines())
    held = leasing.reserve(launch)
    zygote, plan = check_in_fork(launch, program, held.touch)
    leasing.check_way(launch, plan.record)
    leasing.adapt(launch, held, plan)
    if source is not None:  # copy from the folder that was checked, even if another folder has its name now
        plan.copies = {name: source.folder / path.relative_to(source.path) for name, path in plan.copies.items()}
    _outlive_terminal()
    ranks_and_gpus.see(plan.visible)
    listening = _listen(launch.machines())
    restarts = program.default_restarts if launch.max_restarts is None else launch.max_restarts
    record = plan.record | _placement(launch, plan, launch.machines()) | {"max_restarts": restarts} | (fields or {})
    record |= leasing.facts(launch, held, {})
    if launch.command_line:  # a submitted run has that of its submission
        record["command_line"] = launch.command_line
    if launch.trial_of:
        record |= {"trial_of": launch.trial_of, "rung": launch.rung or 0}
    saved = environment.keep(environ, imports.python_files(record), launch.keep_env)
    is_like_source = source is not None and not source.read().get("trial_of")  # trials send nothing
    tells, where = notices.of_launch(
        launch.notify, environ, before=source.folder if source is not None and is_like_source else None
    )
    record |= where if not record.get("submission") else {}  # an engine has its own notices, and kills what is left
    files = plan.files | {environment.FILE: environment.to_json(saved)} | tells
    with doing.now("the copy of the checkpoint" if plan.copies else "the creation of its folder"):
        run = existing or folders.create(runs, launch.name, files=files, record=record, copies=plan.copies)
    lock = run.acquire()
    if lock is None:
        raise Refused(f"{run.name} is running; see: train show {run.name}")
    if existing is not None:
        for name, content in files.items():
            durable.write_atomically(run.folder / name, content)
        run.update(**record, host=socket.gethostname(), reason="")  # last: an incomplete folder is filled again
    plan.warnings = [*saved.warnings, *held.said, *plan.warnings]
    return _opened(run, lock, held, plan=plan, zygote=zygote, listening=listening)


def reopen(launch: Launch, environ: Mapping[str, str], *, by_keeper: bool) -> OpenedRun:
    """Find the run of a resume, take its lock and check the resume. Meanwhile the zygote of the ranks imports torch.

    Raises:
        Refused: the resume is not possible; nothing has been changed.
    """
    own = folders.find_trusted(Path(launch.runs), launch.name)
    record = own.read()
    run = own.by_path() if record.get("cluster") else own  # other machines know the run by its path
    lock = run.acquire(patience=10.0 if record["state"] in CODES else 1.0)
    if lock is None:
        raise Refused(f"{run.name} is running; see: train show {run.name}")
    try:
        return _reopen(launch, run, lock, environ, by_keeper)
    except BaseException:
        lock.release()
        raise


def _reopen(launch: Launch, run: Run, lock: Lock, environ: Mapping[str, str], by_keeper: bool) -> OpenedRun:
    record = run.read()
    copies.clear(run)
    kept = _check_still_wanted(run, record) if by_keeper else None
    machines = launch.machines(record)
    _check_variables(machines)
    folders.enter(record.get("cwd") or "")
    run.clear_stop()  # of the time before

    held = leasing.reserve(launch, run=run, record=record)

    def look() -> None:
        held.touch()
        if wanted := run.stop_asked():
            raise Refused(f"{run.name} was stopped while its resume was checked ({states.WHO.get(wanted, wanted)})")

    zygote, plan = check_in_fork(launch, programs.of_record(record), look)
    leasing.check_way(launch, {**record, **plan.record})
    leasing.adapt(launch, held, plan)
    _outlive_terminal()
    ranks_and_gpus.see(plan.visible)
    listening = _listen(machines)
    changes = plan.record | _placement(launch, plan, machines) | {"kept": kept}
    if launch.max_restarts is not None:
        changes["max_restarts"] = launch.max_restarts
    if launch.rung is not None or record["stopped_by"] == RUNG:  # who resumes it there by hand wants it to the end
        changes["rung"] = launch.rung or 0
    # the recorded process ids belong to the attempt before
    changes |= {"reason": "", "stopped_by": None, "ended": None, "pids": {}, "state": states.CREATED}
    changes |= leasing.facts(launch, held, record)
    files = plan.files
    if not by_keeper:  # this environment holds from now on, for the keeper too
        before = environment.read(run.folder)
        saved = environment.kept_again(before, environ, sources=imports.python_files(record), names=launch.keep_env)
        tells, where = notices.of_launch(launch.notify, environ, before=run.folder)
        files = {environment.FILE: environment.to_json(saved), **files, **tells}
        changes |= where if not resumable.is_kept_elsewhere(record) else {}
    # submitted: a node may lack the key with which the run was signed
    is_copy = record.get(ownership.DIGEST) and not record.get("submitted")
    if not record.get(wandb_run.FIELD) or (is_copy and not run.was_started_here(record)):
        changes[wandb_run.FIELD] = wandb_run.new_id()
    for name, content in files.items():
        durable.write_atomically(run.folder / name, content)
    if not by_keeper:  # last: an interruption before it leaves the `copy` state
        changes |= run.signature({**record, **changes})
    run.update(lambda record: record.pop("refused", None), **changes)
    plan.warnings = [*held.said, *plan.warnings]
    return _opened(run, lock, held, plan=plan, zygote=zygote, listening=listening)


def at_its_turn(launch: Launch, opened: OpenedRun, look: Callable[[], None]) -> OpenedRun:
    """Check a run again that has waited in the queue, and return it ready to start: much may have changed meanwhile.

    Args:
        launch: A resume of it, with what it holds now in `leased`.
        opened: The run as it was queued, with its lock and what it holds now.
        look: Called several times a second during the check. May raise.

    Raises:
        Refused: it can no longer start.
    """
    run, record = opened.run, opened.run.read()
    folders.enter(record.get("cwd") or "")
    zygote, plan = check_in_fork(launch, programs.of_record(record), look)
    ranks_and_gpus.see(plan.visible)
    for name, content in plan.files.items():
        durable.write_atomically(run.folder / name, content)
    changes = plan.record | _placement(launch, plan, None) | {"queued": False, "after": []}
    run.update(**changes, state=states.CREATED, reason="")
    return _opened(run, opened.lock, opened.held, plan=plan, zygote=zygote)


def _opened(run: Run, lock: Lock, held: Reservation, **more: Any) -> OpenedRun:
    lock.leases = held.fds
    return OpenedRun(run=run, spec=read_spec(run), lock=lock, held=held, **more)


def check_in_fork(
    launch: Launch, program: Program = programs.TASK, meanwhile: Callable[[], None] = lambda: None
) -> tuple[Zygote, Plan]:
    """Check a launch in a forked process, so that the task's own code has no effect on this process.

    Also returns the zygote from which that process and the run's ranks are forked.

    Args:
        meanwhile: Called several times a second during the check. May raise.

    Raises:
        Refused: the launch is not possible.
    """
    variables.check_torch(os.environ)
    names, after = program.imports()
    with doing.now("the import of torch"):
        zygote = acquire(hash_seed.with_seed(os.environ), names)
        function = f"{type(launch).__module__}:check"
        try:
            return zygote, zygote.call(function, launch.to_json(), after=after, meanwhile=meanwhile)
        except BaseException:
            zygote.close()  # its fork may be in code that never returns
            raise


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


def _placement(launch: Launch, plan: Plan, cluster: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the fields of run.json about ranks, GPUs and machines."""
    return {
        "cluster": cluster,
        "nproc": plan.ranks,
        "world_size": plan.ranks * numbers_of(cluster)[-1],
        "gpus": plan.visible,
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
    if not run.was_started_here(record):
        raise Refused(f"{run.name} counts as a copy; only its user resumes it: train resume {run.name}")
    if not resumable.keeper_may_start(record):
        raise Refused(f"{run.name} is not restarted by itself (--max-restarts); only its user starts it again")
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

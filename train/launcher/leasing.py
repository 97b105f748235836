"""What a launch wants to hold while it runs, and takes before it is checked: the check may use the GPUs."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..build import cores
from ..errors import Refused, is_whole, whole
from ..gpus import VISIBLE
from ..leases import devices, locks, tickets
from ..leases.devices import CORE, GPU, Device, Reservation, Wants
from ..leases.locks import FOLDER, Holder, Unusable
from ..leases.tickets import Ticket
from ..run import environment, folders, states
from ..run.record import Record
from ..run.run_folder import Run
from ..sweeps.kept import rests_for_sweep
from . import giving_way, ranks_and_gpus
from .request import Launch, Plan

_FEW = 16
"""Maximum number of devices that a ticket names."""
_PATIENCE = 3.0
"""Seconds to try again: the memory of a GPU whose process was killed is free a moment later."""


def reserve(launch: Launch, *, run: Run | None = None, record: Record | None = None) -> Reservation:
    """Take what a launch wants to hold, or say that it waits in the queue. `launch.leased` then names its GPUs.

    CUDA_VISIBLE_DEVICES of this process names the GPUs among which it may choose.

    Args:
        run, record: The run that is resumed, and its run.json.

    Raises:
        Refused: the GPUs are in use, and the launch does not wait; or what it asks for can never be had.
    """
    known: Mapping[str, Any] = record or {}
    asked = known.get("wants") or {}
    launch.lease = launch.lease and bool(asked.get("lease", True))
    launch.gives_way = launch.gives_way or asked.get("gives_way") or ""
    launch.ticket = launch.ticket or known.get("ticket") or time.time_ns()
    check_after(Path(launch.runs), launch.name, launch.after)
    is_by_user = launch.queue is not None  # others leave a run that waits in vain to its own wait, which records why
    is_asked = is_by_user or bool(known.get("queued"))
    if why := _takes_none(launch, record):
        if option := "gives-way" if launch.gives_way else "queue" if launch.queue else "after" if launch.after else "":
            raise Refused(f"--{option}: {why}; leave it out")
        return Reservation()
    if run is not None:
        ranks_and_gpus.see(_visible_for_resume(launch, run))
    held = Reservation(rests_until=giving_way.rests_until(known))
    try:
        held.wants = wants = _wants_of(launch, known, held)
        if wants is None:
            return held
        if launch.queue is None:  # by the keeper, for example
            launch.queue = wants.kind == GPU or bool(known.get("queued") or asked.get("queue"))
        if launch.queue and not launch.after:
            launch.after = [*(known.get("after") or ())]
            if is_by_user:
                check_after(Path(launch.runs), launch.name, launch.after)
        if launch.after or (launch.queue and tickets.waiting(wants.kind)):
            held.is_queued = True
        else:
            _take(launch, held)
        if held.is_queued and not launch.after:
            note = note_of(launch.name, launch.gives_way, launch.ticket, wants=wants)
            held.ticket = Ticket(wants.kind, launch.ticket, Path(launch.runs) / launch.name, note=note)
    except (Unusable, OSError) as error:
        if launch.queue and is_asked:
            raise Refused(f"--queue: {error}; set {FOLDER} to a folder that all users can write") from None
        held.is_queued = False
        held.said.append(f"{error}, so other runs do not know of this one")
    return held


def facts(launch: Launch, held: Reservation, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of run.json about what a run holds or waits for.

    Args:
        before: run.json of a run that is resumed: it keeps its place in the queue.
    """
    found = {
        "wants": {"gpus": _asked_gpus(launch, before), "lease": launch.lease, "gives_way": launch.gives_way,
                  "queue": bool(launch.queue)},
        "queued": held.is_queued, "after": launch.after,
        "ticket": launch.ticket,
    }  # fmt: skip
    if before.get("gave_way"):
        found["gave_way"] = {name: value for name, value in before["gave_way"].items() if name != "since"}
    if held.is_queued:
        what = f"waits for {', '.join(launch.after) or held.wants}"
        found |= {"state": states.QUEUED, "reason": what}
    return found


def _asked_gpus(launch: Launch, before: Mapping[str, Any]) -> str | None:
    """Return --gpus as the user gave it, now or at the start; None: never, or this launch gives --nproc."""
    asked: str | None = (before.get("wants") or {}).get("gpus") if launch.nproc is None else None
    return launch.gpus if launch.gpus is not None else asked


def check_after(runs: Path, name: str, after: Iterable[str]) -> None:
    """Check that a run can wait for other runs.

    Raises:
        Refused: there is no such run, it will never finish, or it waits for this one.
    """
    if name in after:
        raise Refused(f"--after {name}: a run cannot wait for itself; leave it out")
    left, seen = [*after], set[str]()
    while left:
        one = left.pop()
        record = folders.find(runs, one).read_effective()
        others = record.get("after") or []
        if name in others:
            raise Refused(f"--after {one}: {one} waits for {name}; leave it out")
        left += [other for other in others if other not in seen]
        seen.add(one)
    for one in after:
        other = folders.find(runs, one)
        if why := why_never(other, other.read_effective()):
            raise Refused(f"--after {one}: {why}; continue it first: train resume {one}")


def why_never(run: Run, record: Record) -> str:
    """Return why a run does not finish by itself; '' if it has finished, or still may.

    Args:
        record: run.json with the effective state.
    """
    is_over = record["state"] == states.FAILED or (
        record["state"] == states.STOPPED and not (states.rests_by_itself(record) or rests_for_sweep(run, record))
    )
    return f"{record['name']} {'failed' if record['state'] == states.FAILED else 'was stopped'}" if is_over else ""


def check_way(launch: Launch, record: Mapping[str, Any]) -> None:
    """Check that a run that gives way can continue where it was.

    Args:
        record: What is known of its program, as in run.json.

    Raises:
        Refused: it is a script without a session.
    """
    script = record.get("script") or record.get("script_module")
    if launch.gives_way and script and not (record.get("expects_session") or record.get("session")):
        raise Refused(
            f"--gives-way: {script} opens no session, so it would begin anew each time; leave it out, or add "
            "ts.session() (docs/sessions.md)"
        )


def check_waits(launch: Launch, record: Mapping[str, Any]) -> None:
    """Check that a launch could wait in the queue, without taking anything.

    Args:
        record: What is known of its program, as in run.json.

    Raises:
        Refused: it could not.
    """
    check_way(launch, record)
    if launch.lease:
        try:
            locks.folder()
        except Unusable as problem:
            raise locks.refuse(problem) from None
        launch.queue = True
        _wants_of(launch, {}, Reservation())


def adapt(launch: Launch, held: Reservation, plan: Plan) -> None:
    """Give back the GPUs of a run that turns out to train on the CPU, as its config.toml says, and take cores."""
    wants, lines = held.wants, str(plan.files.get("config.toml", "")).splitlines()
    if wants is not None and wants.kind == CORE and 'device = "cuda"' in lines:
        held.said.append("NVML does not show the GPUs of this run, so other runs do not know that it uses them")
    if wants is None or wants.kind == CORE or 'device = "cpu"' not in lines:
        return
    held.wants, launch.leased = _of_cores(wants.count), None
    if held.lease is not None:
        held.lease.release()
    if held.ticket is not None:
        held.ticket.leave()
        held.ticket = None
    if not held.is_queued:
        with contextlib.suppress(Unusable, OSError):
            _take(launch, held)


def _takes_none(launch: Launch, record: Record | None) -> str:
    """Return why a launch holds nothing; '' if it does."""
    if record is not None and record.get("sweep"):
        return "the trials of a sweep wait, not the sweep"
    if not launch.lease:
        return "a run with --no-lease takes what it finds"
    if launch.machines(record):
        return "a run on several machines does not wait for GPUs"
    if (record is not None and record.get("submission")) or getattr(launch, "submission", None):
        return "the cluster has chosen its GPUs"
    return ""


def _visible_for_resume(launch: Launch, run: Run) -> str | None:
    """Return the GPUs among which a resume may choose, as in CUDA_VISIBLE_DEVICES: those that the caller sees if that
    has changed since the start or --gpus counts among them, else those of the start."""
    before = environment.read(run.folder)
    saved = before.values.get(VISIBLE) if before is not None else None
    is_changed = launch.visible is not None and launch.visible != saved
    return launch.visible if is_changed else saved


def _wants_of(launch: Launch, record: Mapping[str, Any], held: Reservation) -> Wants | None:
    """Return what a launch wants to hold; None: nothing, because its GPUs cannot be leased.

    Raises:
        Refused: it asks for a number of GPUs that are not here.
    """
    nproc = launch.nproc or (None if launch.gpus else str(record.get("nproc") or record.get("world_size") or 1))
    count = whole(nproc) if nproc is not None and is_whole(nproc) else 0 if nproc == "auto" else 1
    here: list[Device] = []
    if device_of(launch, record) != "cpu":
        try:
            here = devices.gpus_here()
        except LookupError as error:
            if launch.queue:
                raise Refused(f"--queue: {error} in {VISIBLE} cannot be leased; leave --queue out") from None
            held.said.append(f"{error} in {VISIBLE} cannot be leased, so other runs do not know of this one")
            return None
    if not here:
        return _of_cores(count)
    if launch.gpus is not None:
        return _of_gpus(launch.gpus, here)
    if (asked := _asked_gpus(launch, record)) is not None:
        with contextlib.suppress(Refused):  # the machine has changed; the check says what is missing
            return _of_gpus(asked, here)
    return Wants(GPU, here, min(count, len(here)))


def device_of(launch: Launch, record: Mapping[str, Any]) -> Any:
    """Return the field `device` as far as it is known before the check; None: unknown.

    Args:
        record: run.json of a run that is resumed.
    """
    flags, file, of = (getattr(launch, name, None) for name in ("flags", "config_file", "of"))
    if flags and "device" in flags:
        return flags["device"]
    if file:
        from .. import config as configuration

        with contextlib.suppress(Refused):  # the check says what is wrong
            if given := configuration.read_toml(Path(file)).get("device"):
                return given
    task = Path(getattr(launch, "copy", None) or getattr(launch, "task", None) or "")
    if task.suffix == ".py" and not of:
        from ..code.source import of_task

        with contextlib.suppress(OSError):  # as above
            return of_task(task, task.parent).defaults().get("device")
    return (folders.record_of(Path(launch.runs), of) if of else record).get("device")


def _of_cores(ranks: int) -> Wants:
    """Return what a run on the CPU wants: a core for each rank, as far as there are so many."""
    every = devices.cores_here(cores.usable())
    return Wants(CORE, every, min(max(ranks, 1), len(every)))


def _of_gpus(text: str, here: list[Device]) -> Wants:
    """Return what --gpus says. Raises Refused: there are no such GPUs."""
    ids = ranks_and_gpus.ids_in(text, len(here))
    return Wants(GPU, [here[int(one)] for one in ids] if "," in text else here, len(ids))


def _take(launch: Launch, held: Reservation) -> None:
    """Take what is wanted, or queue. A launch that does not wait tries for some seconds."""
    wants = held.wants
    assert wants is not None
    note = note_of(launch.name, launch.gives_way, launch.ticket, rests_until=held.rests_until)
    until = time.monotonic() + _PATIENCE
    while True:
        held.lease, obstacles = devices.take(wants, note)
        before = tickets.waiting(GPU) if held.lease is not None and wants.kind == GPU and not launch.queue else []
        if held.lease is not None and not before:
            launch.leased = held.lease.visible
            return
        if launch.queue:
            held.is_queued = True
            return
        if wants.kind == CORE:
            _take_some(held, wants, note, obstacles)
            return
        if held.lease is not None:
            held.lease.release()
            first = before[0].holder
            obstacles = [f"{first.run} of {first.user} waits for {first.wants} before it"]
        if time.monotonic() > until:
            break
        time.sleep(0.1)
    way = f"to wait for {wants}: {'' if launch.name else 'train launch with '}--queue"
    raise Refused(f"{', '.join(obstacles)}; {way}; without a lease: --no-lease")


def note_of(name: str, gives_way: str, ticket: int, *, wants: Wants | None = None, rests_until: float = 0.0) -> Holder:
    """Return the note of a run for its leases, or for a ticket with what it wants."""
    more = {"gives_way": gives_way, "number": f"{ticket:020d}", "rests": str(math.ceil(rests_until))}
    if wants is not None:
        few = wants.devices if len(wants.devices) <= _FEW else ()
        more |= {"wants": str(wants), "count": str(max(wants.count, 1)), "among": " ".join(one.key for one in few)}
    return Holder.of(name, **more)


def _take_some(held: Reservation, wants: Wants, note: Holder, obstacles: list[str]) -> None:
    """Take the cores that are free, and say who has the others."""
    others = f"{len(obstacles)} of the {len(wants.devices)} cores here {'is' if len(obstacles) == 1 else 'are'}"
    who = obstacles[0].partition(" is held ")[2] if obstacles else "by others"
    held.said.append(f"{others} held {who}, so this run slows others down; to wait for its turn: --queue")
    for count in range(wants.count - 1, 0, -1):
        held.lease, _ = devices.take(Wants(CORE, wants.devices, count), note)
        if held.lease is not None:
            break

"""A run that gives way (--gives-way): it stops by itself when another one waits for what it holds, and waits behind it.

Each run decides for itself, by the notes in the shared folder; no process signals another run's. Of several runs that
could give way only as many stop as are needed, the youngest first. A run that has just given way rests and is left out.
Imports no torch.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping
from typing import Any

from .. import gpus
from ..errors import is_whole, whole
from ..leases import locks, tickets
from ..leases.devices import Reservation
from ..leases.locks import Holder, Unusable
from ..leases.tickets import Waiting
from ..run import proving, run_folder, states
from ..run.run_folder import Run
from ..signals import WAY, StopRequest
from ..supervise.attempts import record_queued

EVERY = "TRAIN_GIVES_WAY_EVERY"
"""Environment variable: seconds within which a run gives way at most once."""
_EVERY = 600
_LOOK_EVERY = 1.0
_PATIENCE = 3.0
"""Seconds that a run must have waited: what is free is taken sooner."""


class GivingWay:
    """Watches the queue for one run."""

    def __init__(self, run: Run, held: Reservation, stop: StopRequest) -> None:
        record = run.read()
        self._run, self._held, self._stop = run, held, stop
        self._scope = (record.get("wants") or {}).get("gives_way") or "" if held.lease is not None else ""
        self._first_seen = dict[str, float]()
        self._again_at = held.rests_until
        self._pause, self._patience = min(_LOOK_EVERY, _every()), min(_PATIENCE, _every())

    def look(self) -> None:
        """Ask the run to stop if it should give way now. Called several times a second."""
        now = time.time()
        if self._held.lease is not None:
            self._held.lease.touch()
        if not self._scope or now < self._again_at or self._stop.asked:
            return
        self._again_at = now + self._pause
        try:
            waiting = tickets.waiting(self._held.wants.kind) if self._held.wants is not None else []
            first = waiting[0] if waiting else None
            self._first_seen = {first.file.name: self._first_seen.get(first.file.name, now)} if first else {}
            if first and now - self._first_seen[first.file.name] >= self._patience and self._is_due(first):
                self._stop.ask(WAY, f"gave way to {first.holder.run}")
        except (OSError, Unusable):
            return  # without the folder nobody waits

    def _is_due(self, waiter: Waiting) -> bool:
        """Whether this run is one of those that must stop for a waiter."""
        if waiter.holder.gives_way or not self._held.lease:
            return False
        folder = locks.folder()
        files = [folder / name for name in waiter.holder.among.split() if "/" not in name]
        files = files or [*folder.glob(f"{waiter.kind}-*")]
        holders = {file.name: locks.holder(file) for file in files}
        need = whole(waiter.holder.count) if is_whole(waiter.holder.count) else 1
        need -= sum(_is_free(name, holder, waiter) for name, holder in holders.items())
        yielding = {one.number for one in holders.values() if one is not None and _yields(one, waiter)}
        for number in sorted(yielding, reverse=True):
            if need <= 0:
                return False
            names = [name for name, one in holders.items() if one is not None and one.number == number]
            if any(device.key in names for device in self._held.lease.devices):
                return True
            need -= len(names)
        return False


def _is_free(name: str, holder: Holder | None, waiter: Waiting) -> bool:
    """Whether a device is free for a waiter, which holds it for a moment whenever it looks."""
    if holder is not None:
        return holder.number == waiter.holder.number
    return not (name.startswith("gpu-") and gpus.foreign_use(name.removeprefix("gpu-")))


def _yields(holder: Holder, waiter: Waiting) -> bool:
    """Whether the holder of a device gives way to a waiter now."""
    if is_whole(holder.rests) and time.time() < whole(holder.rests):
        return False
    return holder.gives_way == "all" or (holder.gives_way == "mine" and holder.uid == str(waiter.uid))


def _every() -> int:
    text = os.environ.get(EVERY, "")
    return whole(text) if is_whole(text) else _EVERY


def rests_until(record: Mapping[str, Any]) -> float:
    """Return when a run may give way again, in seconds since the epoch.

    Args:
        record: Its run.json, or {}.
    """
    last = run_folder.seconds_of((record.get("gave_way") or {}).get("last"))
    return last + _every() if last is not None else 0.0


def queue_again(run: Run, held: Reservation, reason: str) -> bool:
    """Record that a run that has given way waits again. Returns False if it is not stopped: it has finished, or died.

    Args:
        reason: What it gave way to.
    """
    record, asked = run.read(), proving.asked()
    if not states.gives_way(record):
        return False
    if asked is not None and record["step"] >= asked.stop:  # it was about to stop anyway
        return False
    before: Mapping[str, Any] = record.get("gave_way") or {}
    given = {
        "times": before.get("times", 0) + 1,
        "seconds": before.get("seconds", 0.0),
        "last": (now := run_folder.now()),
    }
    if held.wants is not None and held.lease is not None and not held.wants.count:  # as many as it had
        held.wants = dataclasses.replace(held.wants, count=len(held.lease.devices))
    record_queued(run, reason, gave_way={**given, "since": now})
    held.is_queued, held.lease, held.rests_until = True, None, rests_until(run.read())
    return True


def count_seconds(run: Run) -> None:
    """Add the time since the run gave way last to what that has cost it, when its turn has come."""
    given = dict(run.read().get("gave_way") or {})
    since = run_folder.seconds_of(given.pop("since", None))
    if since is not None:
        run.note(gave_way={**given, "seconds": round(given["seconds"] + max(0.0, time.time() - since), 1)})

"""What can be leased: the GPUs of this machine, or, where there are none, its cores. Takes leases.

A GPU is free if no process holds its lock and NVML knows of no other user. A lock is a file named by the GPU's UUID,
which is the same in all containers; a core has no identity, so its file is one of as many as there are cores.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import time
from collections.abc import Sequence

from .. import gpus
from ..errors import Refused, is_whole, whole
from . import locks
from .locks import Holder
from .tickets import Ticket

SLOTS = "TRAIN_SLOTS"
"""Environment variable with the number of cores that can be leased."""
GPU, CORE = "gpu", "core"
"""Kinds of devices. Each has its own queue."""
_TOUCH_EVERY = 3600.0
_MOST = 64
"""Maximum number of leases of a run."""


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU or a core."""

    key: str
    """Name of its file."""
    label: str
    """Its name in messages."""
    uuid: str = ""
    visible: str = ""
    """Its name in CUDA_VISIBLE_DEVICES."""

    def holder(self) -> Holder | None:
        """Return who holds the lease; None: it is free. Raises Unusable."""
        return locks.holder(locks.folder() / self.key)


@dataclasses.dataclass(frozen=True)
class Wants:
    """What a run wants to hold."""

    kind: str
    devices: Sequence[Device]
    """Those that will do."""
    count: int
    """How many of them; 0: all that are free, at least one."""

    def __str__(self) -> str:
        if self.kind == GPU and self.count == len(self.devices):
            return " and ".join(device.label for device in self.devices)
        return f"{max(self.count, 1)} {'GPU' if self.kind == GPU else self.kind}{'s' if self.count > 1 else ''}"


@dataclasses.dataclass
class Lease:
    """Devices that are held. Processes that inherit a descriptor hold that device too."""

    kind: str
    devices: list[Device]
    fds: list[int]
    touch_at: float = 0.0

    @property
    def visible(self) -> str | None:
        """The value of CUDA_VISIBLE_DEVICES for the ranks; None: it holds cores."""
        return ",".join(device.visible for device in self.devices) if self.kind == GPU else None

    def touch(self) -> None:
        """Say that the files are in use, now and then: some systems remove old files in /tmp."""
        if time.monotonic() > self.touch_at:
            self.touch_at = time.monotonic() + _TOUCH_EVERY
            with contextlib.suppress(OSError):
                for fd in self.fds:
                    os.utime(fd)

    def release(self) -> None:
        """Close this process's copies."""
        for fd in self.fds:
            os.close(fd)
        self.fds = []


@dataclasses.dataclass(kw_only=True)
class Reservation:
    """What a launch holds, or waits for."""

    wants: Wants | None = None
    """None: nothing."""
    lease: Lease | None = None
    """None: it holds nothing yet."""
    is_queued: bool = False
    """Whether it waits in the queue."""
    ticket: Ticket | None = None
    """Its place there, from before its check on, so that nobody passes meanwhile; None: it has none yet."""
    rests_until: float = 0.0
    """When it may give way again, in seconds since the epoch."""
    said: list[str] = dataclasses.field(default_factory=list)
    """Warnings for its user."""

    @property
    def fds(self) -> list[int]:
        """The open files by which it holds its devices."""
        return self.lease.fds if self.lease is not None else []

    def touch(self) -> None:
        """Say that the waiter is awake. Called several times a second during a check."""
        if self.ticket is not None:
            with contextlib.suppress(OSError):
                self.ticket.touch()


def of_gpu(uuid: str, number: int, *, by_number: bool = False) -> Device:
    """Return a GPU as a device.

    Args:
        number: NVML's.
        by_number: Whether CUDA has the same number for it.
    """
    return Device(f"gpu-{uuid}", f"GPU {number}", uuid, str(number) if by_number else uuid)


def gpus_here() -> list[Device]:
    """Return the GPUs that this process may see, in CUDA's order.

    Raises:
        LookupError: CUDA_VISIBLE_DEVICES names something else, such as a MIG slice. The text says what.
    """
    every = gpus.cards()
    # CUDA may count without a GPU that does not answer
    by_number = gpus.numbers_as_nvml() and all(card.number == place for place, card in enumerate(every))
    return [of_gpu(card.uuid, card.number, by_number=by_number) for card in gpus.named_here(every)]


def cores_here(cores: float) -> list[Device]:
    """Return the cores that can be leased.

    Args:
        cores: How many this process may use. TRAIN_SLOTS counts more.

    Raises:
        Refused: TRAIN_SLOTS is no number.
    """
    text = os.environ.get(SLOTS, "")
    if text and not (is_whole(text) and 1 <= whole(text) <= _MOST):
        raise Refused(f"{SLOTS}={text}: give a number from 1 to {_MOST}, or unset it")
    count = whole(text) if text else min(max(1, int(cores)), _MOST)
    return [Device(f"core-{number}", f"core {number}") for number in range(count)]


def take(wants: Wants, note: Holder) -> tuple[Lease | None, list[str]]:
    """Take what is wanted, all of it or nothing. Returns the lease, and what is in the way.

    Raises:
        Unusable: there is no folder for leases.
        OSError: a file in it cannot be used.
    """
    lease, obstacles = Lease(wants.kind, [], []), list[str]()
    folder = locks.folder()
    try:
        for device in wants.devices:
            if wants.count and len(lease.fds) == wants.count:
                break
            try:
                fd = locks.hold(folder / device.key, note)
            except OSError as error:
                obstacles.append(f"{device.label} cannot be reserved ({folder / device.key}: {error.strerror})")
                continue
            if fd is None:
                obstacles.append(held(device.label, device.holder() or Holder()))
                continue
            lease.fds.append(fd)
            if use := gpus.foreign_use(device.uuid) if device.uuid else "":
                os.close(lease.fds.pop())
                obstacles.append(f"{device.label} is in use by {use}, without a lease")
            else:
                lease.devices.append(device)
    except BaseException:
        lease.release()
        raise
    if len(lease.fds) < max(wants.count, 1):
        lease.release()
        return None, obstacles
    return lease, obstacles


def held(label: str, holder: Holder) -> str:
    """Return who holds a device, as a part of a message."""
    about = ", ".join(filter(None, [holder.run, f"since {clock(holder.since)}" if clock(holder.since) else ""]))
    return f"{label} is held by {holder.who}{f' ({about})' if about else ''}"


def clock(stamp: str) -> str:
    """Return a time of day in local time: 09:12, or with the date if it is not today; '' if it is none."""
    try:
        when = datetime.datetime.fromisoformat(stamp).astimezone()
    except ValueError:
        return ""
    is_today = when.date() == datetime.datetime.now().astimezone().date()
    return f"{when:%H:%M}" if is_today else f"{when:%Y-%m-%d %H:%M}"

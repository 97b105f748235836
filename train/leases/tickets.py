"""The queue: a ticket for each run that waits. The lowest ticket of a kind is first, whoever waits, but runs that give
way come after all others.

A ticket only orders: what excludes is the lock of the device. A ticket counts while its waiter holds its lock and looks
every second; a waiter that is suspended is passed over, and has its place again when it continues.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
import time
from pathlib import Path

from . import locks
from .locks import Holder

_NAME = re.compile(r"ticket-(?P<kind>[a-z]+)-[01]-(?P<number>\d{1,20})-(?P<uid>\d{1,10})-[0-9a-f]{8}")
_PATIENCE = 10.0
"""Seconds after which a waiter that has not looked is passed over."""


@dataclasses.dataclass(frozen=True)
class Waiting:
    """A run that waits."""

    kind: str
    file: Path
    holder: Holder
    uid: int


class Ticket:
    """The place of a run in the queue, while this object holds it.

    Args:
        kind: Of the devices that it waits for.
        number: The place: nanoseconds since the epoch when the run first asked. A resume takes the same.
        run: Path of the run folder.
        note: What others are shown.

    Raises:
        Unusable, OSError: the folder cannot be used.
    """

    def __init__(self, kind: str, number: int, run: Path, *, note: Holder) -> None:
        of_run = hashlib.sha256(os.fsencode(run)).hexdigest()[:8]
        name = f"ticket-{kind}-{int(bool(note.gives_way))}-{number:020d}-{os.geteuid()}-{of_run}"
        self.kind, self.file = kind, locks.folder() / name
        made = self.file.with_name(f".{self.file.name}.{os.getpid()}")
        fd = locks.hold(made, note)
        assert fd is not None  # the name is this process's own
        self._fd = fd
        made.rename(self.file)  # locked from the first moment that others see it

    def touch(self) -> None:
        """Say that this waiter is awake. Raises OSError."""
        os.utime(self._fd)

    def look(self) -> list[Waiting]:
        """Say that this waiter is awake. Returns those that are before it.

        Raises:
            OSError, Unusable: the folder cannot be used.
        """
        self.touch()
        return [one for one in waiting(self.kind) if one.file.name < self.file.name]

    def is_there(self) -> bool:
        """Whether the ticket is still in the folder, which may have been emptied."""
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(self._fd), self.file.stat())
        return False

    def leave(self) -> None:
        """Leave the queue."""
        with contextlib.suppress(OSError):
            if self.is_there():
                self.file.unlink()
        os.close(self._fd)


def waiting(kind: str = "") -> list[Waiting]:
    """Return who waits for this kind of device, or for any, in order.

    Raises:
        OSError, Unusable: the folder cannot be used.
    """
    found = []
    for file in locks.folder().iterdir():
        match = _NAME.fullmatch(file.name)
        if match is None or (kind and match["kind"] != kind):
            continue
        holder = locks.holder(file)
        with contextlib.suppress(OSError):
            if holder is None:
                if int(match["uid"]) == os.geteuid():  # its waiter is dead
                    file.unlink()
            elif time.time() - (seen := file.stat()).st_mtime < _PATIENCE:
                found.append(Waiting(match["kind"], file, holder, seen.st_uid))
    return sorted(found, key=lambda one: one.file.name)

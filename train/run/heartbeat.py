"""The signs of life of ranks: a few numbers in a file that say what a rank is doing, for its agent.

The file outlives the rank. Writing it costs one or two microseconds, so every step does it. It is not mapped into
memory, because a failing disk would then cause SIGBUS. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import durable

STARTING, TRAINING, EVALUATING, SAVING, ENDING, COMPUTING_METRICS, COMPILING, ORDERING = range(8)
"""Phases of a rank."""
OF_THE_TASK = (COMPUTING_METRICS, ORDERING)
"""Phases in which all ranks wait for a function of the task on rank 0. It may take any time; that is no hang."""
NAMES = (
    "starting", "training", "evaluating", "saving", "ending", "computing metrics", "compiling",
    "computing the order of samples",
)  # fmt: skip

_FORM = struct.Struct("<qqqq")


@dataclass(frozen=True)
class Beat:
    """A sign of life: a rank's process id, phase and step, and a count of its signs of life."""

    pid: int
    phase: int
    step: int
    count: int


class Heart:
    """Writes the signs of life of a rank."""

    def __init__(self, path: Path) -> None:
        self._count, self._pid = 0, os.getpid()
        self.step, self._phase = 0, STARTING
        self._fd = -1
        with contextlib.suppress(OSError):
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.beat(STARTING, 0)

    def beat(self, phase: int, step: int) -> None:
        """Give a sign of life."""
        self.step, self._phase = step, phase
        if self._fd >= 0:
            self._count += 1
            try:  # noqa: SIM105 - suppress() would be a third of the cost
                os.pwrite(self._fd, _FORM.pack(self._pid, phase, step, self._count), 0)
            except OSError:
                pass

    @contextlib.contextmanager
    def doing(self, phase: int) -> Iterator[None]:
        """Context manager that shows this phase in the middle of another one."""
        before = self._phase
        self.beat(phase, self.step)
        yield
        self.beat(before, self.step)

    def begin_compiling(self) -> None:
        """Show that this rank compiles, in the middle of another phase."""
        before = self._phase
        self.beat(COMPILING, self.step)
        self._phase = before

    def end_compiling(self) -> None:
        """Show the phase of before."""
        self.beat(self._phase, self.step)


def reached(logs: Path) -> int:
    """Return the last step, counted from 1, that any rank of an attempt has made."""
    return max((beat.step for path in logs.glob("rank*.beat") if (beat := read(path))), default=0)


def clear(logs: Path) -> None:
    """Remove the signs of life of an attempt that has ended."""
    for path in logs.glob("rank*.beat"):
        with contextlib.suppress(OSError):
            path.unlink()


def read(path: Path) -> Beat | None:
    """Return the last sign of life of a rank; None if it has given none."""
    try:
        return Beat(*_FORM.unpack(durable.read_bytes(path)))
    except (OSError, struct.error):
        return None


SIGN = ".alive"
"""File in the folder of an attempt's logs. Its modification time is when a script was last seen alive."""


def sign(logs: Path) -> None:
    """Note that a script is alive, at most every few seconds."""
    path = logs / SIGN
    with contextlib.suppress(OSError):
        if not path.exists() or time.time() - path.stat().st_mtime > 5:
            path.touch()


def last_sign(logs: Path) -> float:
    """Return when a script was last seen alive, in seconds since the epoch; 0.0: never."""
    try:
        return (logs / SIGN).stat().st_mtime
    except OSError:
        return 0.0

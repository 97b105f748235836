"""What a rank is doing, readable by its agent at any moment: a few numbers in a file that it has mapped.

Writing them costs less than a microsecond, so every step does, and they outlive the rank. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

STARTING, TRAINING, EVALUATING, SAVING, ENDING = range(5)
NAMES = ("starting", "training", "evaluating", "saving", "ending")

_FORM = struct.Struct("<qqqq")


@dataclass(frozen=True)
class Beat:
    """A rank's process, phase and step, and a number that grows with every sign of life."""

    pid: int
    phase: int
    step: int
    count: int


class Heart:
    """A rank's side. Without a path it beats for nobody."""

    def __init__(self, path: Path | None) -> None:
        self._count = 0
        self.step = 0
        self._map: mmap.mmap | None = None
        if path is not None:
            with contextlib.suppress(OSError), path.open("w+b") as file:
                file.truncate(_FORM.size)
                self._map = mmap.mmap(file.fileno(), _FORM.size)
        self.beat(STARTING, 0)

    def beat(self, phase: int, step: int) -> None:
        """Show a sign of life."""
        self.step = step
        if self._map is not None:
            self._count += 1
            self._map[:] = _FORM.pack(os.getpid(), phase, step, self._count)


def reached(logs: Path) -> int:
    """The last step, counted from 1, that any rank of an attempt has made."""
    return max((beat.step for path in logs.glob("rank*.beat") if (beat := read(path))), default=0)


def read(path: Path) -> Beat | None:
    """The last sign of life of a rank, or None if it has shown none."""
    try:
        return Beat(*_FORM.unpack(path.read_bytes()))
    except (OSError, struct.error):
        return None

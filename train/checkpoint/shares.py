"""Verifies checkpoints on all ranks: each rank reads and hashes its share of the files, and rank 0 decides.

The ranks wait for each other as long as all of them live: the time depends on the size of the checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ..parallel.world import World
from ..run.run_folder import Run
from .manifest import Files, check_files

T = TypeVar("T")

_BEAT = 60.0
"""Seconds between two signs of life. More than a stop waits for one (STOP_WAIT), so that no stop waits for hashing."""


def share_of(files: Files, rank: int, size: int) -> Files:
    """Return the files that a rank checks: about as many bytes as each other rank."""
    loads, mine = [0] * size, Files()
    for name in sorted(files, key=lambda name: (-files[name]["size"], name)):
        least = loads.index(min(loads))
        loads[least] += files[name]["size"]
        if least == rank:
            mine[name] = files[name]
    return mine


class Shares:
    """Checks files of a run's checkpoints on all ranks, which all see the folder of the run."""

    def __init__(self, run: Run, world: World, beat: Callable[[], None]) -> None:
        """
        Args:
            beat: gives a sign of life of this rank.
        """
        self._run, self._world, self._beat = run, world, beat
        self._minute = time.monotonic() // _BEAT

    def on_first(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0, as `world.on_first` does. It may call `check`. A collective."""
        world = self._world.patient if self._world.size > 1 else self._world

        def lead() -> T:
            try:
                return action()
            finally:
                world.broadcast(None)

        while not world.is_first:
            asked: tuple[str, Files] | None = world.broadcast(None)
            if asked is None:
                break
            world.gather_on_first(self._check(*asked))
        return world.on_first(lead)

    def check(self, folder: Path, files: Files) -> dict[str, ValueError]:
        """Check that these files have every byte as written. Returns the errors by file. For an action of rank 0."""
        world = self._world.patient if self._world.size > 1 else self._world
        world.broadcast((folder.name, files))
        parts = world.gather_on_first(self._check(folder.name, files))
        return {name: error for part in parts for name, error in part.items()}

    def _check(self, name: str, files: Files) -> dict[str, ValueError]:
        mine = share_of(files, self._world.rank, self._world.size)
        return check_files(self._run.checkpoints / name, mine, self._sign)

    def _sign(self) -> None:
        """Give a sign of life at the full minute, at the same time as the other ranks."""
        if (minute := time.monotonic() // _BEAT) != self._minute:
            self._minute = minute
            self._beat()

"""The way from one machine of a run to the others: bytes in pieces, through a group of the machines' first ranks.

A rank needs room for a few pieces, whatever the size of a file. Whoever sends or takes goes through all pieces whatever
happens to it, for the others wait for each; what was in the way is raised at the end.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from train import faults
from train.checkpoint.writer import DurableFile
from train.parallel.world import World

_PIECE = 16 << 20
"""Bytes that travel at once."""


class Source(Protocol):
    """Where bytes come from, one after the other."""

    def readinto(self, target: memoryview) -> None:
        """Fill the target. Raises OSError: it cannot."""


class Road:
    """From one machine to those that lack something.

    Args:
        source: the place of the machine that sends, among the leads.
        have: by place, whether a machine needs nothing.
    """

    def __init__(self, world: World, source: int, have: list[bool]) -> None:
        self.world, self._source = world, world.leads[source]
        self.sends = world.rank == self._source
        self.takes = world.is_lead and not have[world.leads.index(world.rank)]

    def tell(self, what: Any) -> Any:
        """What the one who sends says, on every rank."""
        return self.world.share(what if self.sends else None, self._source)

    def pass_on(self, size: int, source: Source | None) -> Iterator[memoryview]:
        """So many bytes, piece by piece. On the first rank of every machine.

        Args:
            source: on the one who sends.

        Raises:
            OSError: after the last piece: the source cannot be read. It has travelled as zeros.
        """
        problem: OSError | None = None
        for at in range(0, size, _PIECE):
            piece = torch.empty(min(_PIECE, size - at), dtype=torch.uint8)
            if source is not None and problem is None:
                try:
                    source.readinto(piece.numpy().data)
                except OSError as error:
                    problem = error
            if problem is not None:
                piece.zero_()
            dist.broadcast(piece, src=self._source, group=self.world.between)
            faults.here("sent")
            yield piece.numpy().data
        if problem is not None:
            raise problem

    def send_file(self, size: int, source: Path | None, target: Path | None) -> dict[str, Any]:
        """Bring one file to those that take it, durably. On the first rank of every machine.

        Args:
            source: on the one who sends. target: on those that take it.

        Returns:
            Size and SHA-256 of what has been written here; {} where nothing is.

        Raises:
            OSError: it cannot be read, or written, here.
        """
        pieces = self.pass_on(size, _File(source) if source is not None else None)
        try:
            return _taken(pieces, target) if target is not None else {}
        finally:
            for _ in pieces:  # the others go on
                pass


def _taken(pieces: Iterator[memoryview], target: Path) -> dict[str, Any]:
    with DurableFile(target) as file:
        for piece in pieces:
            file.write(piece)
    return file.entry


class _File:
    """Reads a file from its begin to its end, and leaves nothing of it in the page cache, where the data are."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def readinto(self, target: memoryview) -> None:
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            done = 0
            while done < len(target):
                count = os.preadv(fd, [target[done:]], self._at + done)
                if not count:
                    raise OSError(errno.EIO, "shorter than it was", str(self._path))
                done += count
            os.posix_fadvise(fd, self._at, done, os.POSIX_FADV_DONTNEED)
            self._at += done
        finally:
            os.close(fd)

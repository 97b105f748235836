"""Text files as one long array of bytes that stays on the disk, and how they are found in a folder."""

from __future__ import annotations

import bisect
import functools
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import Refused, TrainingFailed
from .hidden import is_hidden

_OPEN = 64
"""Maximum number of files that a process keeps open. A corpus may have more files than a process may open."""


class Corpus:
    """Stretches of files, one after the other. A slice reads what it covers.

    Reads with pread, not through a memory map: reading a map of a file that was cut short kills the process, and its
    pages count as the process's memory. A pread moves no position that other processes share.
    """

    def __init__(self, stretches: Iterable[tuple[Path, int, int]]) -> None:
        """
        Args:
            stretches: file, first byte, the one after the last.
        """
        filled = [(path, start, stop) for path, start, stop in stretches if stop > start]
        self._paths = [path for path, _, _ in filled]
        self._starts = [start for _, start, _ in filled]
        self._ends = list(itertools.accumulate(stop - start for _, start, stop in filled))
        self._opened = functools.lru_cache(_OPEN)(functools.partial(open, mode="rb", buffering=0))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, where: slice) -> npt.NDArray[np.uint8]:
        """Return the bytes of this stretch.

        Raises:
            TrainingFailed: a file is shorter than it was.
        """
        at, stop, _ = where.indices(len(self))
        parts = []
        number = bisect.bisect_right(self._ends, at)
        while at < stop:
            begin = self._ends[number - 1] if number else 0
            size = min(stop, self._ends[number]) - at
            part = self._read(self._paths[number], self._starts[number] + at - begin, size)
            parts.append(np.frombuffer(part, dtype=np.uint8))
            at, number = at + size, number + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty(0, np.uint8)])

    def _read(self, path: Path, at: int, size: int) -> bytes:
        text, fd = b"", self._opened(path).fileno()
        while len(text) < size:  # Linux gives at most 2 GB at a time
            more = os.pread(fd, size - len(text), at + len(text))
            if not more:
                raise TrainingFailed(f"{path} is shorter than it was when the run began; put the data back")
            text += more
        return text


def text_files(folder: Path) -> list[tuple[Path, int]]:
    """Return the files below a folder in the order of their paths, with their sizes. Follows links and skips hidden
    files.

    Raises:
        Refused: there are no files, one cannot be read, or a folder cannot be listed.
    """
    files = sorted(_walk(str(folder), frozenset()))
    if not files:
        raise Refused(f"{folder} has no files; put the text files there")
    return files


def _walk(folder: str, above: frozenset[tuple[int, int]]) -> Iterator[tuple[Path, int]]:
    """Walk a folder. `above` are the folders on the way to it, because a link may lead back to one."""
    path = folder
    try:
        info = os.stat(folder)  # noqa: PTH116 - pathlib's takes several times as long, which a million files make felt
        here = (info.st_dev, info.st_ino)
        if here in above:
            return
        with os.scandir(folder) as entries:
            seen = [entry for entry in entries if not is_hidden(entry.name)]
        for entry in seen:
            path = entry.path
            if entry.is_dir():
                yield from _walk(path, above | {here})
            elif entry.is_file():
                if not os.access(path, os.R_OK):
                    raise PermissionError
                yield Path(path), entry.stat().st_size
            elif entry.is_symlink():
                raise Refused(f"{path} is a link that leads nowhere; fix it, or take it out of --data.root")
    except OSError as error:
        path, why = error.filename or path, f" ({error.strerror})" if error.strerror else ""
        raise Refused(f"{path} cannot be read{why}; change its owner or mode, or take it out of --data.root") from None

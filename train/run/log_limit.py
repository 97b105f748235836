"""Limits the logs of ranks: cuts the middle out of one that is too long. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

_LOOK_EVERY = 0.5
"""Seconds between two looks at the logs. A rank may write 100 MB in them."""
_END = 4 << 20
"""Maximum number of bytes at the end of a log that stay."""
_LINE = 1 << 16
"""Maximum number of bytes after which a line is cut anywhere."""
MB = 10**6
FIELD = "log.max"
"""The field of a task or a script with the limit, in MB."""


_NOTE = b" of output were removed here (log.max)\n"
_KNOWN = 200
"""Number of bytes by which a reader knows its place."""


class Place:
    """Where a reader is in a log, also after the middle has been removed."""

    def __init__(self) -> None:
        self._at, self._before = 0, b""

    def enter(self, file: BinaryIO) -> int:
        """Move an open log to what this reader has not read. Returns the position."""
        file.seek(max(self._at - len(self._before), 0))
        if file.read(len(self._before)) != self._before:
            file.seek(max(file.seek(0, os.SEEK_END) - 2 * _END, 0))
            start, text = file.tell(), file.read()
            known, note = text.rfind(self._before), text.find(_NOTE)
            after = known + len(self._before) if known >= 0 else note + len(_NOTE) if note >= 0 else 0
            self._at = start + after
        return file.seek(self._at)

    def has_read(self, text: bytes) -> None:
        """Go on behind what was read."""
        self._at, self._before = self._at + len(text), (self._before + text)[-_KNOWN:]


class LogLimit:
    """Keeps the logs of an attempt below a size.

    Ranks append to their logs directly, so that their output needs no living agent. The agent looks from time to time,
    so a log may be too long for a moment.

    Args:
        paths: The logs.
        most: Maximum number of bytes of each. 0: no limit.
    """

    def __init__(self, paths: Iterable[Path], most: int) -> None:
        self._removed, self._most = dict.fromkeys(paths, 0), most
        self._looked = time.monotonic()

    def look(self) -> None:
        """Cut what is too long, if it is time to look again; call this several times per second."""
        if self._most and time.monotonic() - self._looked >= _LOOK_EVERY:
            self.cut()
            self._looked = time.monotonic()

    def cut(self) -> None:
        """Cut what is too long."""
        for path in self._removed if self._most else ():
            with contextlib.suppress(OSError):
                if path.stat().st_size > self._most:
                    self._removed[path] += self._cut(path)

    def _cut(self, path: Path) -> int:
        """Remove the middle of a log. Returns how many bytes are gone."""
        with path.open("r+b") as file, path.open("ab") as end:
            file.seek(self._most // 2)
            file.readline(_LINE)
            first = file.tell()
            size = file.seek(0, os.SEEK_END)
            file.seek(max(first, size - min(self._most // 4, _END)))
            file.readline(_LINE)
            last = file.read(2 * _END)  # with what a rank writes in this moment
            gone = size - first - len(last)
            text = f"train: {(self._removed[path] + gone) / MB:.0f} MB".encode() + _NOTE
            file.truncate(first)
            end.write(text + last)
        return gone

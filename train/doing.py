"""What the check of a launch is doing now: noted by the process that does it, shown by the process that waits for it.

A task's own function may take an hour, or never return. So the process that waits says which one it waits for.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator

_FIRST = 20.0
"""Seconds after which a wait is first mentioned."""
_EVERY = 60.0
"""Seconds between two lines about a wait, and the longest time without a line."""
_LONGEST = 400
"""Bytes of a note. Each one replaces the note before as a whole."""
_fds: list[int] = []
"""Where this process writes its notes; empty: nobody waits for it."""
_now = [""]
"""What this process is doing, the innermost last."""


def note_in(fd: int) -> None:
    """Write what this process does into this file from now on."""
    _fds[:] = [fd]
    _write(_now[-1])


def file() -> int | None:
    """Return the file into which this process writes its notes, for its forks; None: no process waits for it."""
    return _fds[0] if _fds else None


@contextlib.contextmanager
def noted() -> Iterator[int]:
    """Context manager that gives a file into which this process and its forks write what they do meanwhile."""
    fd = os.memfd_create("doing")
    note_in(fd)
    try:
        yield fd
    finally:
        _fds.clear()
        os.close(fd)


@contextlib.contextmanager
def now(what: str) -> Iterator[None]:
    """Context manager that notes what this process does, such as `lengths()`."""
    _now.append(what)
    _write(what)
    try:
        yield
    finally:
        _now.pop()
        _write(_now[-1])


def _write(what: str) -> None:
    if _fds:
        text = f"{time.monotonic()} {' '.join(what.split())}".encode(errors="replace")[:_LONGEST]
        with contextlib.suppress(OSError):
            os.pwrite(_fds[0], text.ljust(_LONGEST), 0)


class Waiting:
    """Says what a launch waits for: after 20 seconds, then every minute.

    Args:
        name: Name of the run; '': it has none yet.
        fd: The file into which the other process writes its notes.
        say: Prints a line.
    """

    def __init__(self, name: str, fd: int, say: Callable[[str], None]) -> None:
        self._name, self._fd, self._say = name or "the run", fd, say
        self._began = time.monotonic()
        self._latest = self._began + _EVERY
        self._is_first = True

    def look(self) -> None:
        """Print a line if one is due. Call this several times per second."""
        moment, (since, what) = time.monotonic(), self._read()
        if moment < self._latest and not (self._is_first and moment - since >= _FIRST):
            return
        self._is_first, self._latest = False, moment + _EVERY
        self._say(f"{self._name}: {what} has run for {moment - since:.0f} s; Ctrl-C ends the launch")

    def _read(self) -> tuple[float, str]:
        """Return when the other process has begun with what it does, and what that is."""
        with contextlib.suppress(OSError, ValueError):
            stamp, _, what = os.pread(self._fd, _LONGEST, 0).decode(errors="replace").partition(" ")
            return float(stamp), what.strip() or "the check"
        return self._began, "the start"

"""Reading files that others may have damaged or replaced: never a pipe that makes one wait, never without an end."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

MOST = 64 << 20
"""Bytes. No file that is read as a whole comes near: a run.json of ten thousand attempts has 4 MB."""


def read(path: Path, most: int = MOST) -> bytes:
    """All of a plain file.

    Raises:
        OSError: it cannot be read, is larger than `most`, or is no plain file: a pipe would make the reader wait.
    """
    fd = _opened(path)
    try:
        with os.fdopen(fd, "rb") as file:
            # as much as there is: a reader that asks for more has all of it set aside, which a limit may refuse
            text = file.read(min(os.fstat(fd).st_size, most) + 1)
    except MemoryError:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path)) from None
    if len(text) > most:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return text


def lines(path: Path, longest: int) -> Iterator[bytes]:
    """The lines of a plain file, each with its end, one after the other. A longer one comes in pieces of that length.

    Raises:
        OSError: as `read`, whatever its size.
    """
    with os.fdopen(_opened(path), "rb") as file:
        while text := file.readline(longest):
            yield text


def tail(path: Path, most: int) -> bytes:
    """The last bytes of a plain file, at most so many.

    Raises:
        OSError: as `read`, whatever its size.
    """
    with os.fdopen(_opened(path), "rb") as file:
        length = min(file.seek(0, 2), most)
        file.seek(-length, 2)
        return file.read(length)


def _opened(path: Path) -> int:
    # looked at first, for the mere opening of a device can do something; and again, for it may have been replaced
    if stat.S_ISREG(path.stat().st_mode):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
    raise OSError(errno.EINVAL, "it is no plain file", str(path))

"""Files that survive a crash intact: replaced atomically, made durable, locked, read safely. Imports no torch."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from ..errors import Refused, one_line
from . import environment

PRIVATE = (environment.FILE, environment.NOTIFY)
"""Files of a run folder that only their owner may read."""


def open_regular(path: Path, buffering: int = -1) -> BinaryIO:
    """Open a file of a run folder for reading. A foreign run folder may contain a pipe, which would block.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(fd, "rb", buffering)


_LARGEST = 1 << 28
"""Bytes above which a file is no record, configuration, manifest or picture: somebody else may have written it."""


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file. Raises OSError as `open_regular`, and for a file that is far too large."""
    with open_regular(path, buffering=0) as file:
        if os.fstat(file.fileno()).st_size > _LARGEST:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
        return file.read()


def read_tail(path: Path, most: int) -> bytes:
    """Return at most `most` bytes from the end of a regular file. Raises OSError as `open_regular`."""
    with open_regular(path, buffering=0) as file:
        length = min(file.seek(0, os.SEEK_END), most)
        file.seek(-length, os.SEEK_END)
        return file.read()


def sync(path: Path) -> None:
    """fsync a file or a folder. For a folder this makes created and renamed names durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomically(path: Path, content: str | bytes, durable: bool = True) -> None:
    """Replace a file atomically: readers see the old or the new content, and a crash leaves one of the two."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if path.name in PRIVATE else 0o666)
        with os.fdopen(fd, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    if durable:
        sync(path.parent)


def flock(fd: int, how: int, path: Path, *, patience: float = 0.0) -> None:
    """Call flock(2); with LOCK_NB try again for `patience` seconds.

    Raises:
        BlockingIOError: another process holds the lock.
        Refused: the file system has no locks.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            return fcntl.flock(fd, how)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.01)
        except OSError as error:
            raise Refused(
                f"{path} cannot be locked ({error.strerror}), so runs cannot be kept there; choose another folder "
                "with --runs (check it: train doctor --only 'file locks' --runs DIR)"
            ) from None


def try_lock(path: Path, mode: int = 0o644, *, patience: float = 0.0) -> int | None:
    """Lock a file, and make it if it is missing. Returns an open descriptor that holds the lock; None: another process
    holds it.

    Raises:
        Refused: the file system has no locks.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, mode)  # not for reading: data/loader.py
    try:
        flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, path.parent, patience=patience)
    except (BlockingIOError, Refused) as error:
        os.close(fd)
        if isinstance(error, Refused):
            raise
        return None
    return fd


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock on a file.

    Raises:
        Refused: the file system has no locks.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe in its place would block
    except OSError:
        return False
    try:
        # shared, so that two observers do not disturb each other
        flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB, path.parent)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def check_target(target: Path, suffixes: Sequence[str]) -> None:
    """Refuse a --to that cannot become a file.

    Raises:
        Refused: the suffix is unknown, the folder is missing, or the path is a folder.
    """
    if target.suffix not in suffixes:
        raise Refused(f"--to {target}: the file name must end in {' or '.join(suffixes)}")
    if not target.absolute().parent.is_dir():
        raise Refused(f"--to {target}: there is no folder {target.parent}; first: mkdir -p {target.parent}")
    if target.is_dir():
        raise Refused(f"--to {target} is a folder; give a file")


@contextlib.contextmanager
def published(target: Path) -> Iterator[Path]:
    """Context manager that gives a file to write beside the target, and durably renames it to the target on success.

    Raises:
        Refused: the file cannot be written.
    """
    partial = target.with_name(f".{target.stem}.partial{target.suffix}")
    try:
        partial.touch()  # fails with a plain OSError, while libraries raise other errors
        yield partial
        sync(partial)
        partial.replace(target)
        sync(target.absolute().parent)
    except OSError as error:
        raise Refused(f"--to {target}: cannot be written: {error.strerror or one_line(error)}") from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)

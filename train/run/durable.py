"""Files that a crash leaves whole: replaced in one piece, made durable, locked, read safely. Imports no torch."""

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

from train.errors import Refused, one_line
from train.run import environment

PRIVATE = (environment.FILE,)
"""Files of a run folder that only its owner may read."""


def open_regular(path: Path) -> BinaryIO:
    """Open a file of a run folder for reading. Whoever made the folder may have put a pipe there, which would block.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
    return os.fdopen(fd, "rb")


def read_bytes(path: Path) -> bytes:
    """The content of a regular file. Raises OSError as `open_regular`."""
    with open_regular(path) as file:
        return file.read()


def read_tail(path: Path, most: int) -> bytes:
    """The last bytes of a regular file, at most so many. Raises OSError as `open_regular`."""
    with open_regular(path) as file:
        length = min(file.seek(0, os.SEEK_END), most)
        file.seek(-length, os.SEEK_END)
        return file.read()


def sync(path: Path) -> None:
    """fsync of a file, or of a folder: makes names that were created or renamed in it durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomically(path: Path, content: str | bytes, durable: bool = True) -> None:
    """Replace a file as a whole: a reader sees the old content or the new one, a crash leaves one of them."""
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


def flock(fd: int, how: int, path: Path, patience: float = 0.0) -> None:
    """flock(2); with LOCK_NB it is tried again for `patience` seconds.

    Raises:
        BlockingIOError: another process holds it.
        Refused: there are no locks on that file system.
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
                f"{path} cannot be locked ({error.strerror}), so its file system takes no runs; choose another place "
                "with --runs, and see: train doctor --only 'file locks' --runs DIR"
            ) from None


def check_target(target: Path, suffixes: Sequence[str]) -> None:
    """Refuse what cannot become the file that a command writes for its user.

    Raises:
        Refused: the suffix is unknown, the folder is missing, or the file is one.
    """
    if target.suffix not in suffixes:
        raise Refused(f"--to {target}: must end in {' or '.join(suffixes)}")
    if not target.absolute().parent.is_dir():
        raise Refused(f"--to {target}: there is no folder {target.parent}; make it first")
    if target.is_dir():
        raise Refused(f"--to {target}: is a folder; give a file")


@contextlib.contextmanager
def published(target: Path) -> Iterator[Path]:
    """A file beside the target to write to; it takes the target's place, on the disk, where nothing is raised.

    Raises:
        Refused: it cannot be written.
    """
    partial = target.with_name(f".{target.stem}.partial{target.suffix}")
    try:
        partial.touch()  # libraries have errors of their own for a file that cannot be written
        yield partial
        sync(partial)
        partial.replace(target)
        sync(target.absolute().parent)
    except OSError as error:
        raise Refused(f"--to {target}: cannot be written: {error.strerror or one_line(error)}") from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)

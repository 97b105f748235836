"""Files that a crash leaves whole: replaced in one piece, made durable, locked. Imports no torch."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from train.errors import Refused
from train.record import environment

PRIVATE = (environment.FILE,)
"""Files of a run folder that only its owner may read."""


def sync_folder(folder: Path) -> None:
    """fsync of a folder: makes names that were created or renamed in it durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomically(path: Path, text: str, durable: bool = True) -> None:
    """Replace a file as a whole: a reader sees the old text or the new one, a crash leaves one of them."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if path.name in PRIVATE else 0o666)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    if durable:
        sync_folder(path.parent)


def flock(fd: int, how: int, path: Path) -> None:
    """flock(2).

    Raises:
        BlockingIOError: another holds it.
        Refused: there are no locks on that file system.
    """
    try:
        fcntl.flock(fd, how)
    except BlockingIOError:
        raise
    except OSError as error:
        raise Refused(
            f"{path} cannot be locked ({error.strerror}), so its file system takes no runs; choose another place with "
            "--runs, and see: train doctor --only 'file locks' --runs DIR"
        ) from None

"""Lists and reads a mirror in a local folder without following links, because another user may have put them there."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from ..errors import Refused


def sizes(root: Path) -> dict[str, int]:
    """Return every file below a folder with its size; {} if there is no folder. Links are listed, not followed."""
    found = {}
    for folder, folders, files in os.walk(root):
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        for name in [*files, *links]:
            path = Path(folder) / name
            with contextlib.suppress(FileNotFoundError):
                found[path.relative_to(root).as_posix()] = path.lstat().st_size
    return found


def opened(root: Path, name: str) -> BinaryIO:
    """Open a file below a folder for reading.

    Raises:
        Refused: it, or a folder on the way, is a link; it is no plain file; or it may be a file of another user that
            has a second name here (a hard link).
    """
    *folders, last = name.split("/")
    with contextlib.ExitStack() as held:
        at = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        held.callback(os.close, at)
        uid = os.fstat(at).st_uid
        for part in folders:
            at = _open(root, name, part, at, os.O_DIRECTORY)
            held.callback(os.close, at)
        fd = _open(root, name, last, at, os.O_NONBLOCK)  # a pipe would block
        info = os.fstat(fd)
        if stat.S_ISREG(info.st_mode) and (info.st_nlink == 1 or info.st_uid == uid):
            return os.fdopen(fd, "rb")
        os.close(fd)
    raise _refused(root, name)


def _open(root: Path, name: str, part: str, folder: int, flag: int) -> int:
    try:
        return os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flag, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise _refused(root, name) from None
        raise


def _refused(root: Path, name: str) -> Refused:
    return Refused(f"{root / name} is a link or no plain file; a mirror has none, so remove it if you trust the rest")

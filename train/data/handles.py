"""Files that a data set keeps open, made right for several loader processes.

A forked process shares the open files of its parent, their read position with them: two workers that seek and read
through one handle (a plain file, h5py, zipfile, tarfile) get each other's bytes. So every worker opens them anew, in
place, before it fetches anything.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path

from train.errors import Refused

_KEPT = os.O_ACCMODE | os.O_DIRECT | os.O_NONBLOCK | os.O_SYNC
"""Of the flags with which a file was opened, those that its second opening takes over."""


def check() -> None:
    """See that workers can open this process's files anew.

    Raises:
        Refused: they cannot; the message names the file.
    """
    for fd in _with_position():
        try:
            os.close(_opened_again(fd))
        except OSError as error:
            raise Refused(
                f"{Path(f'/proc/self/fd/{fd}').readlink()} is open here and cannot be opened by loader processes "
                f"({error.strerror}); open it in __getitem__ instead of datasets(), or use --data.workers 0"
            ) from None


def open_own() -> None:
    """Give this process a read position of its own in every file that it has inherited."""
    for fd in _with_position():
        own = _opened_again(fd)
        os.dup2(own, fd, inheritable=os.get_inheritable(fd))
        os.close(own)


def _with_position() -> list[int]:
    """The regular files that are open here for reading, apart from standard input and the lock of a run."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        with contextlib.suppress(OSError):  # the listing's own
            if fd > 2 and stat.S_ISREG(os.fstat(fd).st_mode):
                flags = fcntl.fcntl(fd, fcntl.F_GETFL)
                if flags & os.O_ACCMODE != os.O_WRONLY and not flags & os.O_PATH and not _is_lock_of_run(fd):
                    found.append(fd)
    return found


def _is_lock_of_run(fd: int) -> bool:
    """A lock is held by all who inherit the open file, and must not be let go by opening it anew."""
    path = Path(f"/proc/self/fd/{fd}").readlink()
    return path.name == "lock" and path.with_name("run.json").exists()


def _opened_again(fd: int) -> int:
    own = os.open(f"/proc/self/fd/{fd}", fcntl.fcntl(fd, fcntl.F_GETFL) & _KEPT | os.O_CLOEXEC)
    os.lseek(own, os.lseek(fd, 0, os.SEEK_CUR), os.SEEK_SET)
    return own

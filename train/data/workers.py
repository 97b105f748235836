"""What a loader process does before it fetches anything: it leaves stop signals to its rank, and opens files anew.

A forked process shares the open files of its parent, their read position with them: two workers that seek and read
through one handle (a plain file, h5py, sqlite, zipfile) would get each other's bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import stat
from pathlib import Path

from train.errors import Refused
from train.signals import POLITE

IGNORED = (*POLITE, signal.SIGHUP)
"""By loader processes: a save would wait for their data for ever."""


def begin(_: int, rank: int) -> None:
    """Make a loader process of this one.

    Args:
        rank: the process whose it is.
    """
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    # PR_SET_PDEATHSIG: a killed rank's workers go with it and release the run's lock
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != rank:  # it was killed before the line above
        os.kill(os.getpid(), signal.SIGKILL)
    for fd in _open_files():
        own = _opened_again(fd)
        os.dup2(own, fd, inheritable=False)
        os.close(own)


def check_files() -> None:
    """See that workers can open this process's files anew.

    Raises:
        Refused: they cannot; the message names the file.
    """
    for fd in _open_files():
        try:
            os.close(_opened_again(fd))
        except OSError as error:
            raise Refused(
                f"{Path(f'/proc/self/fd/{fd}').readlink()} is open here and cannot be opened by loader processes "
                f"({error.strerror}); open it in __getitem__ instead of datasets(), or use --data.workers 0"
            ) from None


def _open_files() -> list[int]:
    """The regular files that are open here for reading, apart from standard input. A run's lock is open for writing
    alone: it is held by all who share it."""
    found = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the listing's own
            is_read = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY
            if fd > 2 and is_read and stat.S_ISREG(os.fstat(fd).st_mode):
                found.append(fd)
    return found


def _opened_again(fd: int) -> int:
    own = os.open(f"/proc/self/fd/{fd}", fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE | os.O_CLOEXEC)
    os.lseek(own, os.lseek(fd, 0, os.SEEK_CUR), os.SEEK_SET)
    return own

"""Locks on files of the shared folder, with a note of who holds them.

A lock is an open file description lock (fcntl(2), F_OFD_SETLK): processes that inherit the descriptor hold it too, the
kernel frees it when the last of them dies, and others can look without taking it. The note counts only while the lock
is held. The lock protects against accidents: who may use a GPU can also use it without asking. Imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import socket
import stat
import struct
from pathlib import Path
from typing import Any

from ..errors import Refused
from ..run import environment, run_folder

FOLDER = "TRAIN_LEASES"
"""Environment variable with the shared folder."""
_USUAL = (Path("/var/lib/trainstation/leases"), Path("/run/lock/trainstation"), Path("/tmp/trainstation-leases"))
"""Where the folder is otherwise: that of the stations, else one that is empty after a reboot."""
_FLOCK = "hhqqixxxx"
"""struct flock: type, whence, start, length (0: to the end), process."""
_MOST, _LONGEST = 8192, 1000
"""Maximum number of bytes of a note, and of characters of a text in it."""


class Unusable(Exception):
    """There is no folder for leases. The text says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds a lock, by the note in its file. Every text may be '': unknown."""

    user: str = ""
    run: str = ""
    since: str = ""
    """Time of day, ISO 8601 in UTC."""
    uid: str = ""
    """Number of the user on the host and in stations, where names may be equal."""
    station: str = ""
    """Name of the machine or station."""
    wants: str = ""
    """Of a ticket: what it waits for."""
    count: str = ""
    """Of a ticket: how many devices."""
    among: str = ""
    """Of a ticket: the names of their files, if only these will do."""
    gives_way: str = ""
    """`mine` or `all`: to which runs that wait it gives way."""
    rests: str = ""
    """Until when it does not give way again, in seconds since the epoch."""
    number: str = ""
    """Its place in the queue, now or later."""

    @classmethod
    def of(cls, run: str, **more: str) -> Holder:
        """Return the note of this process, for a run."""
        return cls(
            user=environment.user(), run=run, since=run_folder.now(), uid=str(os.geteuid()),
            station=socket.gethostname(), **more,
        )  # fmt: skip

    @property
    def who(self) -> str:
        """The user, and the station if that is another one."""
        elsewhere = f"@{self.station}" if self.station and self.station != socket.gethostname() else ""
        return f"{self.user or 'somebody'}{elsewhere}"

    def to_bytes(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Holder:
        """Return the holder in a note. Anybody can write notes, so what is no short text is left out."""
        found: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(content)
        known = found if isinstance(found, dict) else {}
        texts = {field.name: known.get(field.name) for field in dataclasses.fields(cls)}
        return cls(**{name: _shown(text) if isinstance(text, str) else "" for name, text in texts.items()})


def _shown(text: str) -> str:
    return "".join(one if one.isprintable() else "?" for one in text[:_LONGEST])


def folder() -> Path:
    """Return the shared folder, and make it where it is missing.

    Raises:
        Unusable: it cannot be used.
    """
    given = os.environ.get(FOLDER)
    if given and not Path(given).is_absolute():
        raise Unusable(f"no GPU or core can be reserved ({FOLDER}={given} is no absolute path)")
    problem = ""
    for one in (Path(given),) if given else _USUAL:
        try:
            _make(one)
            if not stat.S_ISDIR(one.lstat().st_mode):
                raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        except OSError as error:
            problem = f"{one}: {error.strerror}"
            if not os.path.lexists(one):
                continue  # it cannot be made here
        else:
            if os.access(one, os.W_OK | os.X_OK):
                return one
            problem = f"{one}: {os.strerror(errno.EACCES)}"
        break  # others use it, so another folder would exclude nobody
    raise Unusable(f"no GPU or core can be reserved ({problem})")


def _make(one: Path) -> None:
    """Make a folder in which every user can make files, but not remove those of others."""
    if os.path.lexists(one):
        return
    with contextlib.suppress(FileExistsError):
        before = os.umask(0)
        try:
            one.mkdir(0o1777)  # in one step, because others may look at once
        finally:
            os.umask(before)


def hold(file: Path, note: Holder) -> int | None:
    """Take the lock of a file, and make the file if it is missing. Returns an open descriptor that holds the lock;
    None: another process holds it.

    Raises:
        OSError: the file cannot be used.
    """
    while True:
        fd = _open(file)
        try:
            if not _take(fd):
                os.close(fd)
                return None
            with contextlib.suppress(OSError):  # a full disk; the note only informs
                os.ftruncate(fd, 0)
                os.pwrite(fd, note.to_bytes(), 0)
                os.utime(fd)  # some systems remove old files
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), file.stat()):
                    return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # somebody has removed the file meanwhile, so this lock excludes nobody


def holder(file: Path) -> Holder | None:
    """Return who holds the lock of a file; None: it is free. Changes nothing."""
    with contextlib.suppress(OSError):
        fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))[0]
            return None if kind == fcntl.F_UNLCK else Holder.from_bytes(os.pread(fd, _MOST, 0))
        finally:
            os.close(fd)
    return None


def _take(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def _open(file: Path) -> int:
    """Open a file for writing that any user may have made.

    Never by O_CREAT alone: in a sticky folder the kernel refuses that for files of others (fs.protected_regular).
    """
    flags = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(file, flags)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                raise OSError(errno.EINVAL, "it is not a regular file", str(file))
            return fd
        with contextlib.suppress(FileExistsError):
            fd = os.open(file, flags | os.O_CREAT | os.O_EXCL, 0o666)
            os.fchmod(fd, 0o666)  # the umask would let only its maker use it
            return fd


def refuse(problem: Unusable) -> Refused:
    """Return the refusal of a command that needs the folder."""
    return Refused(f"{problem}; set {FOLDER} to a folder that all users of this machine can write")

"""Checks the owner of a run folder before anything in it is executed. Imports no torch.

A run folder contains code: a task, modules, an environment, pickles in checkpoints. A user who replaces the folder
could run code as the user who types `train resume`. So owners are read from open descriptors, and the executed files
are read through the same descriptors. A `TrustedRun` was checked so, and what executes files of a run takes one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from ..errors import Refused
from .ownership import FILES, name_of
from .run_folder import Run

TRUSTED = "TRAIN_TRUSTED_OWNER"
"""Environment variable with the uid of another user whose runs this process may execute (see `trust`)."""
_EXECUTED = (
    "run.json", *FILES, "submission.json", "submitted.toml", "job.sbatch", "job.yaml", "checkpoints",
)  # fmt: skip
"""Files of a run folder that are code, or decide which code a command runs."""
_LINKS = 40
"""Maximum number of links on the way to a file, as in Linux."""
_kept: list[Run] = []
"""Run folders to keep open until this process ends, because modules are imported through them."""


class TrustedRun(Run):
    """A run with its folder open. Everything in it that a command would execute was this user's when it was opened."""

    def __init__(self, run: Run) -> None:
        """
        Raises:
            Refused: something belongs to another user.
            OSError: the folder is gone.
        """
        fd = os.dup(run.fd) if run.fd >= 0 else os.open(run.folder, os.O_RDONLY | os.O_DIRECTORY)
        super().__init__(run.path, fd)
        uid = os.fstat(fd).st_uid
        if not _is_mine(uid, fd):
            raise Refused(f"{self.name} belongs to {name_of(uid)}, and its code would run as you; {_way(self.path)}")
        for name in _EXECUTED:
            with contextlib.suppress(FileNotFoundError):
                self.check(name)

    def check(self, name: str) -> None:
        """Refuse a file or folder of the run that another user has put there.

        Raises:
            Refused: it belongs to another user.
            OSError: it is gone.
        """
        os.close(self._open_own(name))

    def code(self, name: str) -> bytes:
        """Return the content of a file of the run, for execution.

        Raises:
            Refused: it belongs to another user.
            OSError: it cannot be read.
        """
        with os.fdopen(self._open_own(name), "rb") as file:
            return file.read()

    def place_to_import(self, name: str) -> Path:
        """Return a path for Python's imports from the run, safe even if another user can replace the folder."""
        beside = self.path.parent.stat()
        is_mine = beside.st_uid in (0, os.geteuid())
        if is_mine and (not beside.st_mode & 0o022 or beside.st_mode & stat.S_ISVTX):
            return self.path / name
        if self not in _kept:
            _kept.append(self)
        return Path(f"/proc/{os.getpid()}/fd/{self.fd}/{name}")  # not /proc/self: child processes use it too

    def _open_own(self, name: str) -> int:
        """Open a file or folder of the run. Follows a link only if this user owns both link and target."""
        _check(self.path / name, self.fd, os.stat(name, dir_fd=self.fd, follow_symlinks=False))
        fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self.fd)
        try:
            _check(self.path / name, self.fd, os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise
        return fd


def trust(folder: Path) -> None:
    """Trust the owner of this run folder, in this process and in those it starts.

    For a Kubernetes pod, which was started for this run and may have another uid than the user who submitted the run.
    """
    with contextlib.suppress(OSError):
        os.environ[TRUSTED] = str(folder.stat().st_uid)


def check_runs(runs: Path) -> None:
    """Refuse to work as root in a folder of runs in which another user can replace files.

    Raises:
        Refused: it is such a folder.
    """
    if os.geteuid() != 0 or not runs.is_dir():
        return
    fd = os.open(runs, os.O_RDONLY | os.O_DIRECTORY)
    try:
        uid = os.fstat(fd).st_uid
        if not _is_mine(uid, fd) and _self_in(fd) == 0:
            where = _station(runs)
            own = f"use a copy: cp -r {runs}/NAME DIR/, then add --runs DIR"
            way = f"use {where}/scripts/train, which works in the station" if where else own
            raise Refused(f"{runs} belongs to {name_of(uid)}, and root uses no runs of other users; {way}")
    finally:
        os.close(fd)


def check_program(path: Path) -> None:
    """Refuse to execute, as root, a file in a station's checkout that users of the station can change.

    Raises:
        Refused: such a user owns the file, a folder on the way to it (it would import modules from there), or a link.
    """
    for one in _way_to(path) if os.geteuid() == 0 else ():
        where = _station(one)
        with contextlib.suppress(OSError):
            if where is not None and (uid := one.lstat().st_uid):
                way = f"use {where}/scripts/train, or a copy outside of this checkout"
                raise Refused(f"{one} belongs to {name_of(uid)}, whose code root must not run; {way}")


def _way_to(path: Path) -> Iterator[Path]:
    """Yield everything that the system looks at to open a path: folders, links, and what the links lead to."""
    here, left, links = Path("/"), [*path.absolute().parts[1:]], 0
    while left:
        part = left.pop(0)
        if part == "..":
            here = here.parent
            continue
        yield here / part
        try:
            target = (here / part).readlink()
        except OSError:  # no link
            here = here / part
            continue
        links += 1
        if links > _LINKS:
            return
        here = Path("/") if target.is_absolute() else here
        left = [*(part for part in target.parts if part != "/"), *left]


def check_checkpoint(folder: Path) -> None:
    """Refuse a checkpoint with files of another user, because some are pickles.

    Raises:
        Refused: a file, or the folder, belongs to another user.
        OSError: it cannot be read.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _check(folder, fd, os.fstat(fd))
        for name in os.listdir(fd):
            _check(folder / name, fd, os.stat(name, dir_fd=fd, follow_symlinks=False))
    finally:
        os.close(fd)


def _check(path: Path, folder: int, found: os.stat_result) -> None:
    """Raise Refused if a file in an open folder belongs neither to this user nor to root."""
    if found.st_uid and not _is_mine(found.st_uid, folder):
        place = Path(os.path.realpath(path.parent)) / path.name
        raise Refused(f"{place} belongs to {name_of(found.st_uid)}, and would run as you; {_way(place)}")


def _way(path: Path) -> str:
    """Return what to type instead, given the run folder or a path in it."""
    if where := _station(path):
        return f"use {where}/scripts/train, which works in the station"
    folder = next((one for one in (path, *path.parents) if (one / "run.json").exists()), path)
    return f"use a copy: mkdir -p mine && cp -r {folder} mine/, then add --runs mine"


def _station(path: Path) -> Path | None:
    """Return the station's checkout that contains a path; None if there is none."""
    return next((one for one in path.absolute().parents if (one / "scripts" / "station.sh").is_file()), None)


def _is_mine(uid: int, folder: int) -> bool:
    return uid == os.geteuid() or str(uid) == os.environ.get(TRUSTED) or uid == _self_in(folder)


def _self_in(folder: int) -> int:
    """Return the uid of files that this process creates in a folder: a file server may map root to another user."""
    name = f".owner-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    except OSError:
        return os.geteuid()
    try:
        return os.fstat(fd).st_uid
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)

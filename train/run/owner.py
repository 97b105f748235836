"""Whose a run is. What would execute something of a run folder takes a folder of this user's alone. Imports no torch.

A run folder holds code: a task, modules, an environment, pickles in checkpoints. Whoever can put a folder of their own
in its place would have that code run as the user who types `train resume`. So the owners are read from open
descriptors, and what is executed is read through the same ones.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import stat
from pathlib import Path

from train.errors import Refused
from train.run import environment, imports
from train.run.run_folder import Run

TRUSTED = "TRAIN_TRUSTED_OWNER"
"""A variable: the number of another user whose runs this process may execute (see `trust`)."""
_EXECUTED = (
    "run.json", "config.toml", environment.FILE, "task.py", imports.MODULES, "submission.json", "submitted.toml",
    "job.sbatch", "job.yaml", "checkpoints",
)  # fmt: skip
"""What decides in a run folder which code a command runs, or is code."""
_kept: list[Run] = []
"""Folders that stay open as long as this process: modules are imported through them."""


def name_of(uid: int) -> str:
    """A user as people know them."""
    with contextlib.suppress(KeyError):
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    return f"uid {uid}"


def of_other(run: Run) -> str:
    """Whose a run is, where it is another user's; '' where it is this user's, or cannot be seen. Writes nothing."""
    with contextlib.suppress(OSError):
        uid = run.folder.stat().st_uid
        return "" if uid == os.geteuid() else name_of(uid)
    return ""


def trust(folder: Path) -> None:
    """Take the owner of this run folder for the user, here and in the processes that this one starts.

    For a pod of Kubernetes, which was started for this very run, and may have another number than who submitted it.
    """
    with contextlib.suppress(OSError):
        os.environ[TRUSTED] = str(folder.stat().st_uid)


def check_runs(runs: Path) -> None:
    """Refuse to work as root in a folder of runs where another user can swap whatever root is about to use.

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
            own = f"choose another folder with --runs; a copy of a run there is yours: cp -r {runs}/NAME DIR/"
            way = f"in the station: {where}/scripts/train" if where else own
            raise Refused(f"{runs} belongs to {name_of(uid)}, and root runs and changes nothing of other users; {way}")
    finally:
        os.close(fd)


def check_program(path: Path) -> None:
    """Refuse to execute, as root, a file of a station's checkout that the users of the station can change.

    Raises:
        Refused: it is such a file, or lies in a folder of theirs, whose modules it would import.
    """
    where = _station(path) if os.geteuid() == 0 else None
    for one in (path, path.parent) if where is not None else ():
        with contextlib.suppress(OSError):
            if uid := one.stat().st_uid:
                way = f"use {where}/scripts/train, or a copy outside of this checkout"
                raise Refused(f"{one} belongs to {name_of(uid)}, whose code root must not run; {way}")


def opened(run: Run) -> Run:
    """The run with its folder open, where all that a command would execute is this user's.

    Raises:
        Refused: something is another user's.
        OSError: it is gone.
    """
    held = run.held()
    uid = os.fstat(held.fd).st_uid
    if not _is_mine(uid, held.fd):
        raise Refused(f"{run.name} belongs to {name_of(uid)}, and its code would run as you; {_way(run.path)}")
    for name in _EXECUTED:
        with contextlib.suppress(FileNotFoundError):
            os.close(_open_own(held, name))
    return held


def read(run: Run, name: str) -> bytes:
    """The content of a file of an `opened` run that is to be executed.

    Raises:
        Refused: it is another user's.
        OSError: it cannot be read.
    """
    with os.fdopen(_open_own(run, name), "rb") as file:
        return file.read()


def check(run: Run, name: str) -> None:
    """Refuse a file or folder of an `opened` run that another user has put there.

    Raises:
        Refused: it is another user's.
        OSError: it is gone.
    """
    os.close(_open_own(run, name))


def check_checkpoint(folder: Path) -> None:
    """Refuse a checkpoint in which another user has put a file: some of them are pickles.

    Raises:
        Refused: a file, or the folder, is another user's.
        OSError: it cannot be read.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _check(folder, fd, os.fstat(fd))
        for name in os.listdir(fd):
            _check(folder / name, fd, os.stat(name, dir_fd=fd, follow_symlinks=False))
    finally:
        os.close(fd)


def place_to_import(run: Run, name: str) -> Path:
    """A path of a file of an `opened` run, for Python's imports: its own, unless another user could swap the folder."""
    beside = run.path.parent.stat()
    is_mine = beside.st_uid in (0, os.geteuid())
    if is_mine and (not beside.st_mode & 0o022 or beside.st_mode & stat.S_ISVTX):
        return run.path / name
    if run not in _kept:
        _kept.append(run)
    return Path(f"/proc/{os.getpid()}/fd/{run.fd}/{name}")  # of this process: those that it starts find it, too


def _open_own(run: Run, name: str) -> int:
    """Open a file or folder within an open run folder. A link is followed only where it is this user's, too."""
    _check(run.path / name, run.fd, os.stat(name, dir_fd=run.fd, follow_symlinks=False))
    fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=run.fd)
    try:
        _check(run.path / name, run.fd, os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check(path: Path, folder: int, found: os.stat_result) -> None:
    """Raises Refused where a file in an open folder is neither this user's nor root's."""
    if found.st_uid and not _is_mine(found.st_uid, folder):
        place = Path(os.path.realpath(path.parent)) / path.name
        raise Refused(f"{place} belongs to {name_of(found.st_uid)}, and would run as you; {_way(place)}")


def _way(path: Path) -> str:
    """What to type instead, given a path in the run folder or its own."""
    if where := _station(path):
        return f"in the station: {where}/scripts/train"
    folder = next((one for one in (path, *path.parents) if (one / "run.json").exists()), path)
    return f"a copy is yours: mkdir -p mine && cp -r {folder} mine/, then add --runs mine"


def _station(path: Path) -> Path | None:
    """The checkout of a station that a path lies in; None: in none."""
    return next((one for one in path.absolute().parents if (one / "scripts" / "station.sh").is_file()), None)


def _is_mine(uid: int, folder: int) -> bool:
    return uid == os.geteuid() or str(uid) == os.environ.get(TRUSTED) or uid == _self_in(folder)


def _self_in(folder: int) -> int:
    """The user to whom files belong that this process makes in a folder: a file server may call root nobody."""
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

"""The folder of runs: checks names, and creates, finds and removes run folders. Imports no torch."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import re
import shutil
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import Refused, nearest, shortened
from . import durable, environment, owner, ownership, wandb_run
from .durable import sync, write_atomically
from .record import FORMAT
from .run_folder import Run, now
from .states import CREATED

NODES = ".nodes"
"""Folder beside the run folders for those of the nodes other than node 0, if all nodes share a disk."""
_naming = threading.Lock()
_named: set[Path] = set()
"""Folders of the names that `fresh_name` has returned; the runs may not exist yet."""
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9_-])?")


def of_node(runs: Path, node: int) -> Path:
    """Return the folder of runs of a node other than node 0, inside a folder of runs that all nodes share."""
    return runs / NODES / str(node)


def of_nodes(runs: Path) -> list[Path]:
    """Return all existing folders of `of_node`."""
    return sorted(runs.glob(f"{NODES}/*"))


def of_node_0(folder: Path) -> Path:
    """Return node 0's run folder, given another node's run folder in `of_node`."""
    return folder.parents[2] / folder.name


def of_this_machine(runs: Path, name: str, node: int | None = None) -> Path:
    """Return the folder that contains this machine's part of a run, in a folder of runs that machines may share.

    Args:
        node: The node of the run; None: the one that ran on this machine.

    Raises:
        Refused: that node has no part of the run here.
    """
    zero, here = record_of(runs, name), socket.gethostname()
    if node:
        if record_of(of_node(runs, node), name):
            return of_node(runs, node)
        if zero.get("cluster") and zero["cluster"]["node"] == 0:
            raise Refused(f"{runs / name} belongs to node 0, and node {node} has no part of it here; launch it there")
        return runs
    if zero.get("submission") or zero.get("host") == here or node == 0:
        return runs
    return next((one for one in of_nodes(runs) if record_of(one, name).get("host") == here), runs)


def record_of(runs: Path, name: str) -> Mapping[str, Any]:
    """Return the record of the run of that name; {} if none can be read."""
    with contextlib.suppress(OSError, Refused):
        return Run(runs / name).read() if _is_file_name(name) else {}
    return {}


def _is_file_name(name: str) -> bool:
    return name not in ("", ".", "..") and "/" not in name


def is_name(name: str) -> bool:
    """Whether a run may have this name."""
    return _NAME.fullmatch(name) is not None


def check_free(runs: Path, name: str) -> None:
    """Raise Refused if this is no run name, a run has it, or the folder of runs is not writable."""
    if not is_name(name):  # shells and hidden files: see also tmux.session_of
        raise Refused(
            f"{shortened(name, 64)!r} is not a legal run name; use up to 64 letters, digits, -, _ and dots, "
            "starting with a letter or digit and not ending with a dot"
        )
    if os.path.lexists(runs / name):
        raise Refused(f"a run named {name} exists in {runs}; choose another name, or: train resume {name}")
    folder = runs
    while not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir():
        raise Refused(f"{folder} is not a folder, so runs cannot be kept in {runs}; choose another folder with --runs")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise Refused(f"cannot write in {folder}; choose another folder with --runs, or change its owner or mode")


def fresh_name(runs: Path, stem: str) -> str:
    """Return a free name in `runs`: the stem, the time, and a number if necessary.

    No two calls in this process return the same name: threads may launch runs at the same time.
    """
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-_.")[:40] or "run"
    name = first = f"{stem}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    number = 1
    with _naming:
        while os.path.lexists(runs / name) or runs / name in _named:
            number += 1
            name = f"{first}-{number}"
        _named.add(runs / name)
    return name


def create(
    runs: Path,
    name: str,
    *,
    files: dict[str, str | bytes],
    record: dict[str, Any],
    copies: Mapping[str, Path] | None = None,
) -> Run:
    """Create a run folder atomically: it appears with all its files or not at all.

    Args:
        copies: Maps names in the run folder to files and folders to copy, before `files` are written.

    Raises:
        Refused: the name is in use, or the folder cannot be written.
    """
    check_free(runs, name)
    staging = runs / f".creating-{name}-{os.getpid()}"
    try:
        runs.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
        for folder in ("logs", "checkpoints"):
            (staging / folder).mkdir()
        for there, path in (copies or {}).items():
            (shutil.copytree if path.is_dir() else shutil.copy2)(path, staging / there)
        for file, content in files.items():
            write_atomically(staging / file, content, durable=False)
        for path in staging.rglob("*") if copies else ():  # the run could not write this checkpoint again
            sync(path)
        with (staging / "lock").open("w") as lock:  # before the folder has its name
            durable.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB, runs)
        base: dict[str, Any] = {
            "format": FORMAT, "name": name, "state": CREATED, "reason": "", "world_size": None, "attempts": [],
            "step": 0, "epoch": 0, "total_steps": None, "tmux_session": None, "pids": {},
            "host": socket.gethostname(), "versions": {}, "git_revision": None, "created": now(), "started": None,
            "ended": None, "weights_sha256": None, "metrics": {}, "stopped_by": None,
            "user": environment.user(), "image": environment.image(), wandb_run.FIELD: wandb_run.new_id(),
        }  # fmt: skip
        base |= record
        base |= ownership.sign(runs / name, base, staging)
        write_atomically(staging / "run.json", json.dumps(base, indent=1) + "\n")
        if os.path.lexists(runs / name):
            raise Refused(f"a run named {name} exists in {runs}; choose another name, or: train resume {name}")
        staging.rename(runs / name)
        sync(runs)
    except shutil.Error as error:
        raise Refused(f"cannot copy into {runs / name}: {error.args[0][0][2]}") from None
    except OSError as error:
        raise Refused(f"cannot create {runs / name} ({error.strerror}); choose another folder with --runs") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return Run(runs / name)


def enter(cwd: str) -> None:
    """Change to the folder in which a run was launched, if it still exists: its task may open files there."""
    if cwd and Path(cwd).is_dir():
        os.chdir(cwd)


class NoRun(Refused):
    """There is no run of this name here."""

    def __init__(self, message: str, runs: Path, name: str) -> None:
        super().__init__(message)
        self.runs, self.name = runs, name


def find(runs: Path, name: str) -> Run:
    """Return the run of that name.

    Raises:
        NoRun: there is none.
    """
    if not name:
        raise Refused("the run's name is empty; see the names: train ls")
    run = Run(runs / name)
    try:
        exists = _is_file_name(name) and (run.folder / "run.json").exists()
    except OSError:  # a name longer than any file's
        exists = False
    if not exists and (own := of_this_machine(runs, name)) != runs:
        return Run(own / name)
    if not exists:
        names = [other.name for other in every(runs)]
        nothing = "; start one: train launch TASK --name NAME, or name another folder: --runs DIR"
        hint = nearest(name, names, otherwise="; see the names: train ls" if names else nothing)
        raise NoRun(f"there is no run {shortened(name, 80)} in {runs}{hint}", runs, name)
    return run


def find_trusted(runs: Path, name: str) -> owner.TrustedRun:
    """Return the run of that name for a command that executes files of it.

    Raises:
        NoRun: there is none.
        Refused: something in it belongs to another user.
    """
    return owner.TrustedRun(find(runs, name))


def every(runs: Path) -> Iterator[Run]:
    """Yield all runs, oldest first. Skips runs that vanish meanwhile or may not be read."""
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(runs):
            folder, made = runs / name, 0.0
            with contextlib.suppress(OSError):
                made = (folder / "lock").stat().st_mtime  # created with the run
            with contextlib.suppress(OSError):
                if not name.startswith(".") and (folder / "run.json").exists():
                    found.append((made, name, folder))
    yield from (Run(folder) for _, _, folder in sorted(found))


def every_here(runs: Path) -> Iterator[Run]:
    """Yield all runs as `every`, then the other nodes' parts of runs on several machines."""
    yield from every(runs)
    for folder in of_nodes(runs):
        yield from every(folder)


def size_of(folder: Path) -> int:
    """Return the bytes of all files below a folder, as `ls -l` counts them. Skips what vanishes meanwhile."""
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                size += os.lstat(f"{place}/{name}").st_size
    return size


def remove(run: Run) -> None:
    """Delete the folder of a run that is not running.

    Raises:
        Refused: the run is running, or the folder cannot be removed.
    """
    lock = run.acquire()
    if lock is None:
        raise Refused(f"{run.name} is {run.stands()}; first: train stop {run.name}")
    try:
        delete_locked(run)
    finally:
        lock.release()


def delete_locked(run: Run) -> None:
    """Delete a run folder. The caller must hold its lock.

    Raises:
        Refused: the folder cannot be removed.
    """
    try:
        grave = run.path.with_name(f".removing-{run.name}-{os.getpid()}")
        run.path.rename(grave)
        shutil.rmtree(grave.resolve())  # the name may be a link to a run on another disk
        if grave.is_symlink():
            grave.unlink()
    except OSError as error:
        raise Refused(f"cannot remove {run.folder}: {error.strerror}") from None

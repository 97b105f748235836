"""The folder of runs: which names are free, how a run's folder appears there, is found, and goes. Imports no torch."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from train.errors import Refused, nearest, shortened
from train.run import durable, ownership
from train.run.durable import sync, write_atomically
from train.run.run_folder import Run, now
from train.run.states import CREATED

NODES = ".nodes"
"""The folder beside run folders in which the nodes but node 0 have theirs, where all see the same disk."""
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9_-])?")


def of_node(runs: Path, node: int) -> Path:
    """Where a node but node 0 has its run folders, in a folder of runs that all nodes see."""
    return runs / NODES / str(node)


def of_nodes(runs: Path) -> list[Path]:
    """All of `of_node` that there are."""
    return sorted(runs.glob(f"{NODES}/*"))


def of_node_0(folder: Path) -> Path:
    """Node 0's run folder, given that of another node in `of_node`."""
    return folder.parents[2] / folder.name


def of_this_machine(runs: Path, name: str, node: int | None = None) -> Path:
    """Where this machine has its part of a run in a folder of runs that several machines may see.

    Args:
        node: which one of the run's nodes is meant; None: the one that was on this host.

    Raises:
        Refused: that node has no part of it here.
    """
    zero, here = record_of(runs, name), socket.gethostname()
    if node:
        if record_of(of_node(runs, node), name):
            return of_node(runs, node)
        if zero.get("cluster") and zero["cluster"]["node"] == 0:
            raise Refused(f"{runs / name} is node 0's, and node {node} has no part of it here; launch it there")
        return runs
    if zero.get("submission") or zero.get("host") == here or node == 0:
        return runs
    return next((one for one in of_nodes(runs) if record_of(one, name).get("host") == here), runs)


def record_of(runs: Path, name: str) -> Mapping[str, Any]:
    """The record of the run of that name; {}: there is none that can be read."""
    with contextlib.suppress(OSError, Refused):
        return Run(runs / name).read() if _is_file_name(name) else {}
    return {}


def _is_file_name(name: str) -> bool:
    return name not in ("", ".", "..") and "/" not in name


def check_free(runs: Path, name: str) -> None:
    """Raises Refused if a run cannot have this name, one has it, or the runs folder cannot be written."""
    if not _NAME.fullmatch(name):  # shells and hidden files: see also tmux.session_of
        raise Refused(
            f"{shortened(name, 64)!r} is not a legal run name: use up to 64 letters, digits, -, _ and dots, "
            "beginning with a letter or digit and not ending with a dot"
        )
    if os.path.lexists(runs / name):
        raise Refused(f"a run named {name} exists in {runs}; choose another name, or: train resume {name}")
    folder = runs
    while not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir():
        raise Refused(f"{folder} is not a folder, so no run can be kept in {runs}; choose another with --runs")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise Refused(f"cannot write in {folder}; choose another place with --runs, or change its owner or mode")


def fresh_name(runs: Path, stem: str) -> str:
    """A free name in `runs`: the stem, the time, and a number if need be."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-_.")[:40] or "run"
    name = first = f"{stem}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    number = 1
    while os.path.lexists(runs / name):
        number += 1
        name = f"{first}-{number}"
    return name


def create(
    runs: Path,
    name: str,
    files: dict[str, str | bytes],
    record: dict[str, Any],
    copies: Mapping[str, Path] | None = None,
) -> Run:
    """Make a run folder as a whole: it appears with all its files or not at all.

    Args:
        copies: files and folders that are copied into it, before `files` are written, by their names there.

    Raises:
        Refused: the name is taken or the folder cannot be written.
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
        for path in staging.rglob("*") if copies else ():  # the run cannot write that checkpoint again
            sync(path)
        with (staging / "lock").open("w") as lock:  # while nothing is there yet
            durable.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB, runs)
        base: dict[str, Any] = {
            "name": name, "state": CREATED, "reason": "", "world_size": None, "attempts": [], "step": 0, "epoch": 0,
            "total_steps": None, "tmux_session": None, "pids": {}, "host": socket.gethostname(), "versions": {},
            "git_revision": None, "created": now(), "started": None, "ended": None, "weights_sha256": None,
            "metrics": {}, "stopped_by": None,
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
        raise Refused(f"cannot create {runs / name}: {error.strerror}; choose another place with --runs") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return Run(runs / name)


def enter(record: Mapping[str, Any]) -> None:
    """Go where a run was launched, as far as that is still there: its task may open files beside it."""
    if record.get("cwd") and Path(record["cwd"]).is_dir():
        os.chdir(record["cwd"])


def find(runs: Path, name: str) -> Run:
    """The run of that name.

    Raises:
        Refused: there is none.
    """
    if not name:
        raise Refused("the run's name is empty; train ls lists the runs")
    run = Run(runs / name)
    try:
        exists = _is_file_name(name) and (run.folder / "run.json").exists()
    except OSError:  # a name longer than any file's
        exists = False
    if not exists and (own := of_this_machine(runs, name)) != runs:
        return Run(own / name)
    if not exists:
        names = [other.name for other in every(runs)]
        hint = nearest(name, names, "; train ls lists the runs" if names else "; there are no runs yet")
        raise Refused(f"there is no run {shortened(name, 80)} in {runs}{hint}")
    return run


def every(runs: Path) -> Iterator[Run]:
    """All runs, the oldest first. What vanishes meanwhile, or may not be looked into, is left out."""
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(runs):
            folder = runs / name
            with contextlib.suppress(OSError):
                if not name.startswith(".") and (folder / "run.json").exists():
                    lock = folder / "lock"  # made with the run
                    found.append((lock.stat().st_mtime if lock.exists() else 0.0, name, folder))
    yield from (Run(folder) for _, _, folder in sorted(found))


def every_here(runs: Path) -> Iterator[Run]:
    """All runs as `every`, then the parts that nodes have of runs on several machines."""
    yield from every(runs)
    for folder in of_nodes(runs):
        yield from every(folder)


def remove(run: Run) -> None:
    """Delete a run folder that is not alive.

    Raises:
        Refused: the run is alive, or the folder cannot be removed.
    """
    lock = run.acquire()
    if lock is None:
        raise Refused(f"{run.name} is running; first: train stop {run.name}")
    try:
        delete_locked(run)
    finally:
        lock.release()


def delete_locked(run: Run) -> None:
    """Delete a run folder. For the holder of its lock.

    Raises:
        Refused: it cannot be removed.
    """
    try:
        grave = run.path.with_name(f".removing-{run.name}-{os.getpid()}")
        run.path.rename(grave)
        shutil.rmtree(grave.resolve())  # the run may have been moved to another disk, and a link have its name
        if grave.is_symlink():
            grave.unlink()
    except OSError as error:
        raise Refused(f"cannot remove {run.folder}: {error.strerror}") from None

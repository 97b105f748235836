"""Brings a run back from its mirror: only whole checkpoints, and as a whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path, PurePosixPath

from ..checkpoint.manifest import MANIFEST, verify
from ..errors import Refused
from ..run import durable, folders, ownership
from ..run.record import other_format
from ..run.run_folder import Run
from . import state as states
from .copying import step_of
from .remote import OWNER, Remote, described
from .state import State


def fetch(url: str, runs: Path, name: str | None) -> tuple[Run, list[str], int]:
    """Fetch the run at a URL into the folder of runs. It is a copy until its user resumes it.

    Returns the run, a line for each checkpoint that is not whole, and the bytes of the files.

    Raises:
        Refused: there is no run, its name is taken, or it cannot be read.
    """
    try:
        remote = Remote(url)
        owner = remote.owner()
        if owner is None:
            raise Refused(f"no run is mirrored at {url}; give the URL of its checkpoint.mirror")
        content = json.loads(remote.read("run.json"))
        name = name if name is not None else str(content["name"])
        if why := other_format(content, url):
            raise Refused(why)
        folders.check_free(runs, name)
        staging = runs / f".fetching-{name}-{os.getpid()}"
        staging.mkdir(parents=True)
        try:
            left_out, size = _download(remote, staging)
            # whatever it was: here its user must want it, because a resume executes code of the folder
            content |= {ownership.STATION: None, ownership.DIGEST: None, "pids": {}, "tmux_session": None}
            durable.write_atomically(staging / "run.json", json.dumps(content, indent=1) + "\n")
            states.write(Run(staging), State(id=owner.run), is_durable=True)
            (staging / "logs").mkdir(exist_ok=True)
            (staging / "checkpoints").mkdir(exist_ok=True)
            Run(staging).read()
            (staging / "lock").touch()
            for path in staging.rglob("*"):
                durable.sync(path)
            folders.check_free(runs, name)
            staging.rename(runs / name)
            durable.sync(runs)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except Refused:
        raise
    except Exception as error:
        raise Refused(f"{url} cannot be fetched: {described(error)}") from None
    return Run(runs / name), left_out, size


def _download(remote: Remote, target: Path) -> tuple[list[str], int]:
    """Write all files into a folder, but no checkpoint that is not whole. Returns lines about those, and the bytes."""
    names = {name: size for name, size in remote.names().items() if _is_wanted(name)}
    manifests = {step_of(name) for name in names if name.endswith(f"/{MANIFEST}")}
    steps = sorted({step_of(name) for name in names} - {0})
    lines = [f"step {step} is left out: it was not copied as a whole" for step in steps if step not in manifests]
    size = 0
    for name in names:
        if not step_of(name):
            size += _fetch(remote, name, target)
    for step in sorted(manifests - {0}):
        folder = Run(target).checkpoint(step)
        try:
            size += sum(_fetch(remote, name, target) for name in names if step_of(name) == step)
            verify(folder)
        except (ValueError, FileNotFoundError) as error:
            what = described(error) if isinstance(error, FileNotFoundError) else str(error)
            lines.append(f"step {step} is left out: {what}")
            shutil.rmtree(folder, ignore_errors=True)
    return lines, size


def _is_wanted(name: str) -> bool:
    """Whether a file belongs to a run, and stays inside its folder."""
    parts = PurePosixPath(name).parts
    is_inside = ".." not in parts and not name.startswith("/")
    is_part = parts[0].startswith(".") or parts[-1].startswith(".partial-")
    return is_inside and not is_part and name not in (OWNER, states.FILE, "run.json", "lock")


def _fetch(remote: Remote, name: str, target: Path) -> int:
    path = target / name
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = 0o600 if name in durable.PRIVATE else 0o666
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        for piece in remote.pieces(name):
            file.write(piece)
        return file.tell()

"""This user's station: its key, its id, and the digest in run.json that shows that a run was started here.

The keeper resumes only runs that this station has started: a run folder may come from anywhere, and a resume executes
files in it. The digest covers the run's name, its folder, and everything that decides what a resume executes. Imports
no torch.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import pwd
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import durable, environment

STATION, DIGEST = "station", "station_digest"
"""Fields of run.json: the id of the station that has started the run, and the digest with its key. None: no key."""
MODULES = "modules.zip"
"""File in the run folder with copies of what the task imports and reads; code/imports.py writes it."""
FILES = ("task.py", MODULES, "config.toml", "sweep.json", environment.FILE, environment.NOTIFY)
"""Files of a run folder that decide, with run.json, what a resume or the end of the run executes."""
_FIELDS = ("task", "task_source", "script", "script_module", "script_arguments", "on_restart", "cwd", "cluster")
_KEY_BYTES = 32


def name_of(uid: int) -> str:
    """Return a user as text."""
    with contextlib.suppress(KeyError):
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    return f"uid {uid}"


def other_user(folder: Path) -> str:
    """Return the owner of another user's folder; '' if it is this user's or cannot be read. Writes nothing."""
    with contextlib.suppress(OSError):
        uid = folder.stat().st_uid
        return "" if uid == os.geteuid() else name_of(uid)
    return ""


def state_folder() -> Path:
    """Return the folder with this user's state. It does not depend on XDG variables, which differ between shells.

    Raises:
        OSError: the user has no home folder.
    """
    given = Path(os.environ.get("TRAIN_STATE") or "-")
    try:
        return given if given.is_absolute() else Path.home() / ".local" / "state" / "trainstation"
    except RuntimeError as error:
        raise OSError(errno.ENOENT, str(error)) from None


def station_id(make: bool = False) -> str | None:
    """Return the id of this station; None: it has no key. With `make`, create a missing key."""
    key = _key(make)
    return None if key is None else hashlib.sha256(b"station id" + key).hexdigest()[:12]


def sign(folder: Path, record: Mapping[str, Any], files: Path | None = None) -> dict[str, Any]:
    """Return the fields of run.json that show that this station has started the run; both None without a key.

    Args:
        folder: The run folder, which may not exist yet.
        files: The folder with its files now, if that is another one.
    """
    station = station_id(make=True)
    digest = _digest(folder, record, files or folder)
    return {STATION: station if digest else None, DIGEST: digest}


def was_started_here(folder: Path, record: Mapping[str, Any], files: Path | None = None) -> bool:
    """Whether this station has started the run, and the run is unchanged in the same folder. `files`: as in `sign`."""
    given, digest = record.get(DIGEST), _digest(folder, record, files or folder)
    return digest is not None and isinstance(given, str) and given.isascii() and hmac.compare_digest(given, digest)


def _digest(folder: Path, record: Mapping[str, Any], files: Path) -> str | None:
    """Return the digest of a run with the key; None: there is no key, or a file of the run cannot be read."""
    key = _key()
    if key is None:
        return None
    fields = {name: record.get(name) for name in _FIELDS}
    try:
        present = [name for name in FILES if (files / name).exists()]
        content = {name: hashlib.sha256(durable.read_bytes(files / name)).hexdigest() for name in present}
        message = json.dumps([folder.name, str(folder.resolve()), fields, content], sort_keys=True)
    except OSError:
        return None
    return hmac.new(key, message.encode(), "sha256").hexdigest()


def _key(make: bool = False) -> bytes | None:
    """Return this user's key; None if there is none and none can be created."""
    with contextlib.suppress(OSError):
        if make and not (state_folder() / "key").exists():
            _make_key(state_folder())
        key = durable.read_bytes(state_folder() / "key")
        return key if len(key) == _KEY_BYTES else None
    return None


def _make_key(folder: Path) -> None:
    """Create the key atomically; of several processes the first one wins."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = folder / f".key.{os.getpid()}"
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(os.urandom(_KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(partial, folder / "key")
        durable.sync(folder)
    finally:
        partial.unlink(missing_ok=True)

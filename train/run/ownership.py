"""This user's station: its key, its id, and the digest in run.json which shows that a run was started here.

The keeper resumes only what this station has started: a run folder may come from anywhere, and a resume executes what
lies in it. The digest covers the run's name and folder and whatever decides what a resume executes. Imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train.run import durable, environment

STATION, DIGEST = "station", "station_digest"
"""In run.json: the id of the station that has started the run, and the digest by its key. None: it has no key."""
_FILES = ("task.py", "modules.zip", "config.toml", environment.FILE)
_FIELDS = ("task", "task_source", "script", "script_arguments", "cwd", "cluster")
_KEY_BYTES = 32


def state_folder() -> Path:
    """Where the state of this user's Trainstation lies: the same in every shell, whatever its dotfiles set.

    Raises:
        OSError: the user has no home folder.
    """
    given = Path(os.environ.get("TRAIN_STATE") or "-")
    try:
        return given if given.is_absolute() else Path.home() / ".local" / "state" / "trainstation"
    except RuntimeError as error:
        raise OSError(errno.ENOENT, str(error)) from None


def station_id(make: bool = False) -> str | None:
    """The id of this station; None: it has no key. `make`: the key is made where there is none yet."""
    key = _key(make)
    return None if key is None else hashlib.sha256(b"station id" + key).hexdigest()[:12]


def sign(folder: Path, record: Mapping[str, Any], files: Path | None = None) -> dict[str, Any]:
    """What run.json must have so that this station knows the run as its own; without a key, None for both.

    Args:
        folder: the run folder, which may not exist yet.
        files: where its files lie now, if not there.
    """
    station = station_id(make=True)
    digest = _digest(folder, record, files or folder)
    return {STATION: station if digest else None, DIGEST: digest}


def was_started_here(folder: Path, record: Mapping[str, Any], files: Path | None = None) -> bool:
    """Whether this station has started the run, and it is still the same run in the same folder. `files`: as `sign`."""
    given, digest = record.get(DIGEST), _digest(folder, record, files or folder)
    return digest is not None and isinstance(given, str) and given.isascii() and hmac.compare_digest(given, digest)


def _digest(folder: Path, record: Mapping[str, Any], files: Path) -> str | None:
    """The digest of a run by the key; None: there is no key, or a file of the run cannot be read."""
    key = _key()
    if key is None:
        return None
    fields = {name: record.get(name) for name in _FIELDS}
    try:
        present = [name for name in _FILES if (files / name).exists()]
        content = {name: hashlib.sha256(durable.read_bytes(files / name)).hexdigest() for name in present}
        message = json.dumps([folder.name, str(folder.resolve()), fields, content], sort_keys=True)
    except OSError:
        return None
    return hmac.new(key, message.encode(), "sha256").hexdigest()


def _key(make: bool = False) -> bytes | None:
    """This user's key; None: there is none, and none can be made."""
    with contextlib.suppress(OSError):
        if make and not (state_folder() / "key").exists():
            _make_key(state_folder())
        key = durable.read_bytes(state_folder() / "key")
        return key if len(key) == _KEY_BYTES else None
    return None


def _make_key(folder: Path) -> None:
    """Make the key as a whole or not at all; the first of several processes makes it."""
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

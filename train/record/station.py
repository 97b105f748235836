"""This user's station: the folder of its state, and the keeper's sign of life there. Imports no torch."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path


def state_folder() -> Path:
    """Where the state of this user's Trainstation lies.

    Raises:
        OSError: the user has no home folder.
    """
    given = Path(os.environ.get("XDG_STATE_HOME") or "-")
    try:
        return (given if given.is_absolute() else Path.home() / ".local" / "state") / "trainstation"
    except RuntimeError as error:
        raise OSError(errno.ENOENT, str(error)) from None


def touch_keeper() -> None:
    """Give the keeper's sign of life, where the state folder can be written."""
    with contextlib.suppress(OSError):
        state_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        (state_folder() / "keeper").touch(mode=0o600)


def keeper_ends() -> None:
    """Take the sign of life away: a keeper that ends as it was asked to is not missed."""
    with contextlib.suppress(OSError):
        (state_folder() / "keeper").unlink()


def keeper_seen() -> float | None:
    """When a keeper of this user gave its last sign of life, in seconds since the epoch; None: none runs."""
    with contextlib.suppress(OSError):
        return (state_folder() / "keeper").stat().st_mtime
    return None

"""The sign of life of a keeper: files in this user's state folder that it touches while it lives.

One is the same for all keepers, and one belongs to the folder of runs that it keeps.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from pathlib import Path

from ..run import ownership

_LATE = 60.0
"""Seconds without a sign of life after which a keeper counts as dead: it may be handling many runs."""


def _path(runs: Path | None = None) -> Path:
    """Return the file that a keeper of this user touches, or that of this folder of runs. Raises OSError without a home
    folder."""
    of_folder = "" if runs is None else f"-{hashlib.sha256(os.fsencode(os.path.realpath(runs))).hexdigest()[:16]}"
    return ownership.state_folder() / f"keeper{of_folder}"


def touch(runs: Path) -> None:
    """Give the sign of life of the keeper of these runs, if the state folder is writable."""
    with contextlib.suppress(OSError):
        _path().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in (_path(), _path(runs)):
            path.touch(mode=0o600)


def remove(runs: Path) -> None:
    """Remove the sign of life of a keeper that ends on request."""
    with contextlib.suppress(OSError):
        for path in (_path(runs), _path()):
            path.unlink(missing_ok=True)


def last_seen() -> float | None:
    """Return when a keeper of this user last gave a sign of life, in seconds since the epoch. None: no keeper runs."""
    with contextlib.suppress(OSError):
        return _path().stat().st_mtime
    return None


def is_alive(runs: Path) -> bool:
    """Whether a keeper of this user lives that keeps these runs."""
    with contextlib.suppress(OSError):
        return time.time() - _path(runs).stat().st_mtime < _LATE
    return False

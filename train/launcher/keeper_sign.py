"""The sign of life of a keeper: a file in this user's state folder that it touches while it lives."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from ..run import ownership

_LATE = 60.0
"""Seconds without a sign of life after which a keeper counts as dead: it may be handling many runs."""


def _path() -> Path:
    """Return the file that a keeper of this user touches while it lives. Raises OSError without a home folder."""
    return ownership.state_folder() / "keeper"


def touch() -> None:
    """Give the keeper's sign of life, if the state folder is writable."""
    with contextlib.suppress(OSError):
        _path().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _path().touch(mode=0o600)


def remove() -> None:
    """Remove the sign of life of a keeper that ends on request."""
    with contextlib.suppress(OSError):
        _path().unlink()


def last_seen() -> float | None:
    """Return when a keeper of this user last gave a sign of life, in seconds since the epoch. None: no keeper runs."""
    with contextlib.suppress(OSError):
        return _path().stat().st_mtime
    return None


def is_alive() -> bool:
    """Whether a keeper of this user lives."""
    return time.time() - (last_seen() or 0.0) < _LATE

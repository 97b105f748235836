"""Named points at which a test can kill, stall or fail this process. When off, a point costs one comparison with None.

    TRAIN_FAULT="save.renamed:2:kill" train run …

kills the process by SIGKILL at the second passage of that point. The actions are `kill` (the default), `stop` (SIGSTOP,
which looks like a hang) and `error` (an OSError, as from a failing disk). `@R` after the point limits it to rank R.
docs/reliability.md lists the points.
"""

from __future__ import annotations

import errno
import os
import signal

POINTS = (
    "start", "loaded", "step", "update", "evaluate",
    "save.staged", "save.begin", "save.frozen", "save.written", "save.shards", "save.manifest", "save.synced",
    "save.renamed", "save.published", "prune.renamed", "prune.removed", "snapshot.begin", "snapshot.written",
    "snapshot.sealed",
    "digest", "finish", "finished", "decided",
)  # fmt: skip
"""All points, in the order of a run. `save.frozen` is passed only in a run with frozen weights, once. At `digest` the
weights are about to be hashed, by all ranks if they are sharded.
`decided` is in the supervisor: the end of the run is decided but not yet recorded."""

_armed: dict[str, tuple[int, str]] | None = None


def arm(text: str | None, rank: int) -> None:
    """Set the faults of TRAIN_FAULT, separated by commas: POINT[@RANK][:COUNT[:WHAT]].

    Raises:
        ValueError: a point is unknown.
    """
    global _armed  # noqa: PLW0603 - off must cost nothing
    found: dict[str, tuple[int, str]] = {}
    for part in filter(None, (text or "").split(",")):
        place, _, rest = part.partition(":")
        count, _, what = rest.partition(":")
        point, _, only = place.partition("@")
        if point not in POINTS:
            raise ValueError(f"TRAIN_FAULT: there is no point {point}; use one of {', '.join(POINTS)}")
        if not only or int(only) == rank:
            found[point] = (int(count or 1), what or "kill")
    _armed = found or None


def here(point: str) -> None:
    """Pass a point, and fail there if a fault is set."""
    if _armed is None or point not in _armed:
        return
    left, what = _armed[point]
    _armed[point] = (left - 1, what)
    if left != 1:
        return
    if what == "error":
        raise OSError(errno.EIO, f"{os.strerror(errno.EIO)} (TRAIN_FAULT {point})")
    os.kill(os.getpid(), signal.SIGSTOP if what == "stop" else signal.SIGKILL)

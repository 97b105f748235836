"""Named points at which a test can kill, stall or fail this process. Free when off: one comparison with None.

    TRAIN_FAULT="save.renamed:2:kill" train run …

kills the process by SIGKILL at the second passage of that point. What can happen there: `kill` (the default), `stop`
(SIGSTOP, which looks like a hang), `error` (an OSError, as of a disk that fails). With `@R` after the point only rank
R does it. docs/reliability.md lists the points.
"""

from __future__ import annotations

import errno
import os
import signal

POINTS = (
    "start", "loaded", "step", "update", "evaluate",
    "save.staged", "save.begin", "save.written", "save.shards", "save.manifest", "save.synced", "save.renamed",
    "save.published", "prune.renamed", "prune.removed", "snapshot.begin", "snapshot.written", "snapshot.sealed",
    "digest", "finish", "finished", "decided",
)  # fmt: skip
"""Every point, in the order of a run. At `digest` weights are about to be hashed, by all ranks where each has a part.
At the last one, the supervisor's, how the run ended is decided and not yet written down."""

_armed: dict[str, tuple[int, str]] | None = None


def arm(text: str | None, rank: int) -> None:
    """Set the faults that TRAIN_FAULT describes, several parted by commas: POINT[@RANK][:COUNT[:WHAT]].

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
            raise ValueError(f"TRAIN_FAULT: there is no point {point}; there are {', '.join(POINTS)}")
        if not only or int(only) == rank:
            found[point] = (int(count or 1), what or "kill")
    _armed = found or None


def here(point: str) -> None:
    """Pass a point."""
    if _armed is None or point not in _armed:
        return
    left, what = _armed[point]
    _armed[point] = (left - 1, what)
    if left != 1:
        return
    if what == "error":
        raise OSError(errno.EIO, f"{os.strerror(errno.EIO)} (TRAIN_FAULT {point})")
    os.kill(os.getpid(), signal.SIGSTOP if what == "stop" else signal.SIGKILL)

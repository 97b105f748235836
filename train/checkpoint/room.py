"""Memory for snapshots, taken before it is needed, where there is enough."""

from __future__ import annotations

import threading
from collections.abc import Callable

from train.checkpoint.packed import Packed
from train.checkpoint.shared import Slots, begin_of_tensors

SLACK = 1 << 16
"""Bytes by which the plain part of a state may grow, half of them by lines."""
_AT_ONCE = 1 << 26
"""Bytes that are reserved without a thread: it takes some hundredths of a second."""


def longest(state: Packed) -> int:
    """Bytes of the plain part of a state with whatever lines."""
    return len(state.plain([])) + SLACK // 2


def least(state: Packed) -> int:
    """Bytes of a buffer that it goes into with whatever lines."""
    return begin_of_tensors(longest(state)) + state.end


def needed(state: Packed) -> int:
    """Bytes of a buffer to take for it: those, and some by which the plain part grows with its numbers."""
    return begin_of_tensors(len(state.plain([])) + SLACK) + state.end


def problem(slots: Slots, size: int, left: int, ranks: int = 1) -> str:
    """Why memory for two contents of so many bytes is not to be taken, in a line; '' if it is, or has been.

    Args:
        left: bytes that can still be had.
        ranks: how many take as much of it.
    """
    missing = 2 * size - slots.taken
    if missing <= 0 or missing * ranks <= left / 2:
        return ""
    many = f"{2 * ranks} x {words(size)}"
    return (
        f"no snapshots in memory: {many} are more than half of the {words(left)} that are left; "
        "a death costs the steps since the last checkpoint"
    )


def take(slots: Slots, size: int, failed: Callable[[str], None]) -> None:
    """Begin to take memory for two contents of so many bytes; `slots.holds` tells when it is there.

    Args:
        failed: is called where it cannot be had, by whatever thread, with the reason in a line.
    """

    def reserve() -> None:
        try:
            slots.reserve(size)
        except OSError as error:
            failed(f"no snapshots in memory: {error.strerror}")

    if size <= _AT_ONCE:
        return reserve()
    try:
        threading.Thread(target=reserve, daemon=True, name="reserve snapshots").start()
    except RuntimeError as error:  # no more threads
        failed(f"no snapshots in memory: {error}")
    return None


def words(size: float) -> str:
    """Bytes in words."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size / 1e3:.0f} kB"

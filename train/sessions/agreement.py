"""The ranks of a session agree after which update they all stop, or all save, without a collective in each step.

Whoever wants something says so in the store. The others look there at most every `LOOK_EVERY` seconds. Each that has
seen it says so and looks at every border from then on. When all have seen it, rank 0 names the update. Updates need the
gradients of all ranks, so no rank can have passed that update by then. No call waits for another rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

LOOK_EVERY = 0.25
"""Seconds between two looks at the store by a rank that was asked nothing itself."""
_AHEAD = 2
"""Number of updates between the one in which rank 0 names an update and the one that it names."""


class Agreement:
    """What the ranks do after an update, agreed through the store.

    Args:
        store: A torch.distributed store; None for a single rank.
        settle: Waits until this rank has computed all that it has queued: a CPU may be updates ahead of its GPU.
    """

    def __init__(self, store: Any, *, rank: int, size: int, settle: Callable[[], None] = lambda: None) -> None:
        self._store, self._rank, self._size, self._settle = store, rank, size, settle
        self._number = 0
        """Number of agreements so far."""
        self._looked = 0.0
        self._is_heard = False
        """Whether this rank has said that it looks at every border."""
        self._at: int | None = None
        self._what = ""
        self.comes_next = ""
        """What follows the update that is made now. All ranks know it then."""

    def due(self, updates: int, wants: str) -> str:
        """Return what all ranks do after this many updates; '' for nothing. Each rank calls it at the same borders.

        Args:
            wants: What this rank wants; '' for nothing.
        """
        if self._size == 1:
            return wants
        if not self._is_heard and not self._has_heard(wants):
            return ""
        self._settle()
        if self._at is None:
            self._appoint(updates)
        if self._at is None or updates < self._at:
            self.comes_next = self._what if self._at == updates + 1 else ""
            return ""
        what, self._at, self._is_heard, self.comes_next = self._what, None, False, ""
        self._number += 1
        return what

    def _has_heard(self, wants: str) -> bool:
        """Whether a rank wants something. Says that this rank knows."""
        if wants:
            self._store.set(f"{self._number}/wanted", wants)
        else:
            now = time.monotonic()
            if now - self._looked < LOOK_EVERY:
                return False
            self._looked = now
            if not self._store.check([f"{self._number}/wanted"]):
                return False
        self._settle()
        self._is_heard = True
        if self._rank:
            self._store.add(f"{self._number}/heard", 1)
        return True

    def _appoint(self, updates: int) -> None:
        """On rank 0: name the update once all ranks look at every border. On the others: read it, if it is named."""
        named = f"{self._number}/named"
        if self._rank == 0:
            if self._store.add(f"{self._number}/heard", 0) < self._size - 1:
                return
            what = self._store.get(f"{self._number}/wanted").decode()
            self._at, self._what = updates + _AHEAD, what
            self._store.set(named, f"{self._at} {what}")
        elif self._store.check([named]):
            at, _, self._what = self._store.get(named).decode().partition(" ")
            self._at = int(at)

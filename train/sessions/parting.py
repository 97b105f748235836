"""The ranks of a session leave their loop alike. Where one leaves by `break` and another goes on, the run fails.

Otherwise a rank would wait in a collective for one that never comes. Each rank that has left says so in the store of
the ranks. A thread of each rank that goes on looks there, because its main thread may be inside a collective.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from ..errors import TrainingFailed

_LOOK_EVERY = 0.5
"""Seconds between two looks at the store."""
_GRACE = 5.0
"""Seconds after which a rank that has left its loop says so. By then an exception would have ended it."""
_POLL = 0.05
"""Seconds between two looks of a rank that waits for the others."""
_PATIENCE = 7200.0
"""Seconds a rank that has left its loop waits for the others, which may evaluate."""
_END = "end"
"""How a rank has left that has reached the end of the loop. The others say in which epoch or step."""


class Parting:
    """How this rank leaves its loops, and whether the others do alike.

    Args:
        store: a torch.distributed store; None for a single rank.
        fail: ends this process as failed, for this reason. Called in a thread.
    """

    def __init__(self, store: Any, *, rank: int, size: int, fail: Callable[[str], None]) -> None:
        self._store, self._rank, self._size, self._fail = store, rank, size, fail
        self.at = 0
        """The epoch or the step that this rank is in, counted from 1."""
        self._loops, self._unit = 0, ""
        self._how, self._left_at, self._is_said = "", 0.0, False
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, unit: str) -> None:
        """A loop begins.

        Args:
            unit: what `at` counts, for messages.

        Raises:
            TrainingFailed: the ranks have left the loop before at different places.
        """
        self.settle()
        self._how, self.at, self._unit, self._is_said = "", 0, unit, False
        self._loops += 1
        if self._store is not None and self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="train-parting", daemon=True)
            self._thread.start()

    def leave(self) -> None:
        """This rank leaves the loop before its end: by `break`, or by an exception."""
        self._left_at, self._how = time.monotonic(), str(self.at)

    def reach_end(self) -> None:
        """This rank has reached the end of the loop. Waits for the others, and raises as `settle` does."""
        self._how = _END
        self.settle()

    def settle(self) -> None:
        """Wait until all ranks have left the loop.

        Raises:
            TrainingFailed: one has left it elsewhere, or none comes.
        """
        if self._store is None or not self._how:
            return
        self._say()
        keys, until = [self._key(rank) for rank in range(self._size)], time.monotonic() + _PATIENCE
        while not self._store.check(keys):
            if self._store.check([self._key("failed")]):
                raise TrainingFailed(self._store.get(self._key("failed")).decode())
            if time.monotonic() > until:
                raise TrainingFailed(f"rank {self._rank} has left the loop, and another rank does not come")
            time.sleep(_POLL)
        hows = [self._store.get(key).decode() for key in keys]
        if len(set(hows)) > 1:
            first = min(range(self._size), key=lambda rank: (hows[rank] == _END, hows[rank].zfill(20)))
            other = next(rank for rank in range(self._size) if hows[rank] != hows[first])
            raise TrainingFailed(self._text(first, hows[first], other))
        self._how = ""

    def close(self) -> None:
        """End the thread: one that is inside the store while Python ends would abort the process."""
        self._is_over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_GRACE)

    def _key(self, what: object) -> str:
        return f"left/{self._loops}/{what}"

    def _text(self, rank: int, how: str, other: int) -> str:
        return f"rank {rank} left the loop at {self._unit} {how}, rank {other} did not"

    def _say(self) -> None:
        if not self._is_said:
            self._is_said = True
            self._store.set(self._key(self._rank), self._how)
            if self._how != _END:  # the others are looking for it
                self._store.set(self._key("first"), f"{self._rank} {self._how}")

    def _watch(self) -> None:
        while not self._is_over.wait(_LOOK_EVERY):
            try:
                self._look()
            except RuntimeError:  # the store is gone, so the ranks are ending
                return

    def _look(self) -> None:
        if self._how:
            if self._how != _END and time.monotonic() - self._left_at > _GRACE:
                self._say()
            return
        key = self._key("first")
        if not self._loops or not self._store.check([key]):
            return
        rank, _, how = self._store.get(key).decode().partition(" ")
        if self.at > int(how) and not self._how and key == self._key("first"):
            text = self._text(int(rank), how, self._rank)
            self._store.set(self._key("failed"), text)
            self._fail(text)

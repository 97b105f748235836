"""Where the time of an attempt goes, by the clock of one rank, from the moment it was ready."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from train.record.record import Times


class Account:
    """Seconds, each counted once. What is in none of them is computing."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self.start = self.checkpoints = self.evaluation = 0.0

    @contextlib.contextmanager
    def spent(self, part: str) -> Iterator[None]:
        """Around what belongs to a part: start, checkpoints or evaluation; never one inside another."""
        began = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, part, getattr(self, part) + time.perf_counter() - began)

    def read(self, step: int, data: float, communication: float | None) -> Times:
        """All of it, up to now.

        Args:
            step: the last one that was made.
            data, communication: measured where they come about; None where that is not told apart from computing.
        """
        return {
            "step": step, "seconds": time.perf_counter() - self._began, "start": self.start, "data": data,
            "communication": communication, "checkpoints": self.checkpoints, "evaluation": self.evaluation,
        }  # fmt: skip

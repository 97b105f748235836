"""Says when training waits for data, and what helps."""

from __future__ import annotations

import os

SHARE = 0.3
"""Of the time: what is above it is worth a word."""
_LONG, _SHORT = 5.0, 1.0
"""Seconds to have looked at before the word, while training goes on and at its end."""


class DataWait:
    """How much of the time of training went by waiting for data, on rank 0."""

    def __init__(self, name: str, workers: int, ranks: int) -> None:
        """
        Args:
            ranks: on this machine.
        """
        self._name, self._workers = name, workers
        self._cores = len(os.sched_getaffinity(0))
        self._fair = max(self._cores // ranks, 1)
        self._waited = self._elapsed = 0.0
        self._first: tuple[float, float] | None = None
        self._told = False

    def add(self, waited: float, elapsed: float) -> None:
        """Take in a stretch of training, in seconds. The first one, that of starting, counts only without others."""
        if self._first is None:
            self._first = waited, elapsed
            return
        self._waited += waited
        self._elapsed += elapsed

    def advice(self, is_last: bool) -> str:
        """A line with the share and the remedy, once, if there is reason for it; '' otherwise."""
        waited, elapsed = self._waited, self._elapsed
        if is_last and not elapsed:
            waited, elapsed = self._first or (0.0, 0.0)
        if self._told or elapsed < (_SHORT if is_last else _LONG) or waited <= SHARE * elapsed:
            return ""
        self._told = True
        return f"training waits for data {waited / elapsed:.0%} of the time; {self._remedy()}"

    def _remedy(self) -> str:
        if self._workers < self._fair:
            return (
                f"give each rank loader processes (it has {self._workers}): train stop {self._name}, then train resume "
                f"{self._name} --data.workers {min(self._fair, 16)}; the result stays the same"
            )
        return (
            f"the {self._cores} cores here have {self._workers} loader processes a rank: make samples cheaper to read "
            "(smaller files, decoded and resized beforehand, a faster disk)"
        )

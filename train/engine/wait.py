"""Says when training waits for data, and what helps."""

from __future__ import annotations

import math

from train.engine import threads

SHARE = 0.3
"""Of the time: what is above it is worth a word."""
_LONG, _SHORT = 5.0, 1.0
"""Seconds to have looked at before the word, while training goes on and at its end."""
_MOST = 32
"""Loader processes a rank that are ever advised: each holds batches in memory."""


def needed(workers: int, waited: float, elapsed: float) -> int:
    """Loader processes a rank with which fetching would take no longer than computing.

    Without any, waiting is fetching; with some, all of them have fetched all the time, or nobody would have waited.

    Args:
        workers: that it has.
        waited, elapsed: seconds of waiting for data, and in all, over the same steps.
    """
    fetching = workers * elapsed if workers else waited
    return math.ceil(fetching / max(elapsed - waited, 1e-3 * elapsed) - 1e-9)


def verdict(name: str, workers: int, waited: float, elapsed: float, ranks: int, cores: int) -> str:
    """How much of its time training waits for data, and what helps; '' where it is not worth a word.

    Args:
        name: of the run.
        workers: loader processes of a rank.
        waited, elapsed: seconds, over the same steps.
        ranks, cores: on this machine.
    """
    if waited <= SHARE * elapsed:
        return ""
    said, wish = f"training waits {waited / elapsed:.0%} for data", needed(workers, waited, elapsed)
    better = min(wish, max(cores // ranks, 1), _MOST)
    if better <= workers:
        has = f"{workers} loader process{'' if workers == 1 else 'es'}"
        return (
            f"{said}: each rank has {has} on its share of {cores} cores; make samples cheaper to read "
            "(smaller files, decoded and resized beforehand, a faster disk)"
        )
    rest = f"; {wish} would be enough, on more cores than {cores}" if better < min(wish, _MOST) else ""
    return (
        f"{said}: raise data.workers to {better} (train stop {name}, then train resume {name} --data.workers {better}; "
        f"the result stays the same{rest})"
    )


class DataWait:
    """How much of the time of training went by waiting for data, on rank 0."""

    def __init__(self, name: str, workers: int, ranks: int) -> None:
        """
        Args:
            ranks: on this machine.
        """
        self._name, self._workers, self._ranks = name, workers, ranks
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
        """The verdict, once, if there is reason for it; '' otherwise."""
        waited, elapsed = self._waited, self._elapsed
        if is_last and not elapsed:
            waited, elapsed = self._first or (0.0, 0.0)
        if self._told or elapsed < (_SHORT if is_last else _LONG):
            return ""
        if waited <= SHARE * elapsed:  # to ask for cores is to read files, and this is asked at every line
            return ""
        said = verdict(self._name, self._workers, waited, elapsed, self._ranks, threads.share(1))
        self._told = bool(said)
        return said

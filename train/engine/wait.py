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


def needed(workers: int, waited: float, elapsed: float, host: float) -> int:
    """Loader processes a rank with which fetching would take no longer than computing.

    Without any, the host fetches while it waits; with some, all of them have fetched all the time, or nothing would
    have stood still.

    Args:
        workers: that it has.
        waited, elapsed, host: seconds in which training stood still for want of data, in all, and in which the host
            waited for it (on a GPU maybe longer than training stood still), over the same steps.
    """
    fetching = workers * elapsed if workers else host
    return math.ceil(fetching / max(elapsed - waited, 1e-3 * elapsed) - 1e-9)


def verdict(name: str, workers: int, waited: float, elapsed: float, host: float, ranks: int, cores: int) -> str:
    """How much of its time training waits for data, and what helps; '' where it is not worth a word.

    Args:
        name: of the run.
        workers: loader processes of a rank.
        waited, elapsed, host: seconds, as in `needed`.
        ranks, cores: on this machine.
    """
    if waited <= SHARE * elapsed:
        return ""
    said, wish = f"training waits {waited / elapsed:.0%} for data", needed(workers, waited, elapsed, host)
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
        self._waited = self._elapsed = self._host = 0.0
        self._first: tuple[float, float, float] | None = None
        self._told = False

    def add(self, waited: float, elapsed: float, host: float) -> None:
        """Take in a stretch of training, in seconds, as in `needed`. The first one, that of starting, counts only
        without others."""
        if self._first is None:
            self._first = waited, elapsed, host
            return
        self._waited += waited
        self._elapsed += elapsed
        self._host += host

    def advice(self, is_last: bool) -> str:
        """The verdict, once, if there is reason for it; '' otherwise."""
        waited, elapsed, host = self._waited, self._elapsed, self._host
        if is_last and not elapsed:
            waited, elapsed, host = self._first or (0.0, 0.0, 0.0)
        if self._told or elapsed < (_SHORT if is_last else _LONG):
            return ""
        if waited <= SHARE * elapsed:  # to ask for cores is to read files, and this is asked at every line
            return ""
        said = verdict(self._name, self._workers, waited, elapsed, host, self._ranks, threads.share(1))
        self._told = bool(said)
        return said

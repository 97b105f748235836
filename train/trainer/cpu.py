"""How a rank uses the CPU: threads and loader processes where the user has set none, and advice where data are late.

Another number of threads gives other bits, so it depends on nothing that varies from launch to launch, and is recorded
in the run's configuration.
"""

from __future__ import annotations

import math
import os

import torch

from train import cores

SMALL = 100_000
"""Parameters of a model that computes on one thread: several would wait for each other longer than they work."""
_MOST_LOADERS = 8
"""Loader processes that a rank takes by default: each holds some batches in shared memory."""
SHARE = 0.3
"""Of the time: waiting for data above this is reported."""
_LONG, _SHORT = 5.0, 1.0
"""Seconds to observe before advice is given, during training and at its end."""
_MOST_ADVISED = 32
"""Loader processes a rank that are ever advised: each holds batches in memory."""


def share(ranks: int) -> int:
    """The cores that this process may use, over the ranks; at least 1."""
    return max(1, int(cores.usable() // ranks))


def loaders(ranks: int, device: torch.device, is_indexed_at_once: bool) -> int:
    """Loader processes of a rank, where the user set none.

    Args:
        is_indexed_at_once: whether a batch is one indexing of tensors, which costs less than another process.
    """
    if device.type == "cpu" or is_indexed_at_once:
        return 0
    return min(max(share(ranks) - 1, 1), _MOST_LOADERS)


def threads(ranks: int, device: torch.device, model: torch.nn.Module) -> tuple[int, str]:
    """Threads of a rank, and why: by OMP_NUM_THREADS, else 1 for a small model, else its share of the cores."""
    wish = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if wish.isdecimal() and 1 <= int(wish) <= 4096:
        return int(wish), "by OMP_NUM_THREADS"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if device.type == "cpu" and parameters < SMALL:
        return 1, f"the model has {parameters:,} parameters; from {SMALL:,} on it would be a share of the cores"
    return share(ranks), "a fair share of the cores"


def loaders_needed(workers: int, waited: float, elapsed: float, host: float) -> int:
    """Loader processes a rank with which fetching would take no longer than computing.

    Without any, the host fetches while it waits; with some, all of them were fetching all the time, else training would
    not have waited.

    Args:
        workers: that it has.
        waited, elapsed, host: seconds in which training waited for data, in all, and in which the host did (on a GPU
            maybe longer than training), over the same steps.
    """
    fetching = workers * elapsed if workers else host
    return math.ceil(fetching / max(elapsed - waited, 1e-3 * elapsed) - 1e-9)


class WaitAdvice:
    """Observes on rank 0 how much training waits for data, and says once what helps."""

    def __init__(self, name: str, workers: int, ranks: int) -> None:
        """
        Args:
            name: of the run.
            workers: loader processes of a rank.
            ranks: on this machine.
        """
        self._name, self._workers, self._ranks = name, workers, ranks
        self._waited = self._elapsed = self._host = 0.0
        self._first: tuple[float, float, float] | None = None
        self._is_given = False

    def add(self, waited: float, elapsed: float, host: float) -> None:
        """Add a stretch of training, in seconds, as in `loaders_needed`. The first counts only without others: it
        includes starting."""
        if self._first is None:
            self._first = waited, elapsed, host
            return
        self._waited += waited
        self._elapsed += elapsed
        self._host += host

    def text(self, is_last: bool) -> str:
        """The advice, once, if there is reason for it; '' otherwise."""
        waited, elapsed, host = self._waited, self._elapsed, self._host
        if is_last and not elapsed:
            waited, elapsed, host = self._first or (0.0, 0.0, 0.0)
        if self._is_given or elapsed < (_SHORT if is_last else _LONG) or waited <= SHARE * elapsed:
            return ""
        self._is_given = True
        return self._advise(waited, elapsed, host)

    def _advise(self, waited: float, elapsed: float, host: float) -> str:
        workers, usable = self._workers, share(1)
        text, wish = f"training waits {waited / elapsed:.0%} for data", loaders_needed(workers, waited, elapsed, host)
        better = min(wish, max(usable // self._ranks, 1), _MOST_ADVISED)
        if better <= workers:
            has = f"{workers} loader process{'' if workers == 1 else 'es'}"
            return (
                f"{text}: each rank has {has} on its share of {usable} cores; make samples cheaper to read "
                "(smaller files, decoded and resized beforehand, a faster disk)"
            )
        rest = f"; {wish} would be enough, on more cores than {usable}" if better < min(wish, _MOST_ADVISED) else ""
        return (
            f"{text}: raise data.workers to {better} (train stop {self._name}, then train resume {self._name} "
            f"--data.workers {better}; the result stays the same{rest})"
        )

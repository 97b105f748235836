"""Where the time of an attempt goes by one rank's clock, the speed of steps, and advice if data are late."""

from __future__ import annotations

import contextlib
import math
import resource
import time
from collections.abc import Iterator

import torch

from ..build import cores
from ..run.metrics import Speed
from ..run.record import Times
from .prefetch import DataWait

_WAITING = 0.3
"""Share of the time above which waiting for data is reported."""
_LONG, _SHORT = 5.0, 1.0
"""Seconds to observe before advice is given, during training and at its end."""
_MOST_ADVISED = 32
"""Maximum number of data workers per rank that is advised: each holds batches in memory."""


class Timing:
    """Seconds of each part of training, each counted once, and the speed since the last line of metrics.

    The rest of the time is computing.
    """

    def __init__(self, wait: DataWait, advice: WaitAdvice, device: torch.device) -> None:
        self.wait, self.advice, self._device = wait, advice, device
        self._began = time.perf_counter()
        self._parts = {"start": 0.0, "checkpoints": 0.0, "evaluation": 0.0}
        self.restart()

    @contextlib.contextmanager
    def spent(self, part: str) -> Iterator[None]:
        """Context manager that counts time for a part: start, checkpoints or evaluation. Parts are never nested."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._parts[part] += time.perf_counter() - began

    def times(self, step: int, communication: float | None) -> Times:
        """Return the seconds of all parts up to now.

        Args:
            step: the last one that was made.
            communication: its seconds; None if it cannot be separated from computing.
        """
        return {
            "step": step, "seconds": time.perf_counter() - self._began, "start": self._parts["start"],
            "data": self.wait.seconds(), "communication": communication, "checkpoints": self._parts["checkpoints"],
            "evaluation": self._parts["evaluation"],
        }  # fmt: skip

    def step(self, samples: int) -> None:
        """Count a step."""
        self._samples += samples
        self._steps += 1

    def count(self, amount: float) -> None:
        """Add the count that the loss of a step returned."""
        self._counted += amount

    def restart(self) -> None:
        """Measure the speed from now on."""
        self._since = time.perf_counter()
        self._waited, self._fetched = self.wait.seconds(), self.wait.host
        self._samples = self._steps = 0
        self._counted = 0.0

    def speed(self) -> Speed:
        """Return the speed of the steps since the last call, and the memory."""
        elapsed, steps = max(time.perf_counter() - self._since, 1e-9), max(self._steps, 1)
        waited = self.wait.seconds() - self._waited
        self.advice.add(waited, elapsed, self.wait.host - self._fetched)
        if self._device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(self._device)
        else:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        figures: Speed = {
            "samples_per_s": self._samples / elapsed,
            "data_wait": waited / steps,
            "step_time": elapsed / steps,
            "memory": memory,
        }
        if self._counted:
            figures["counted_per_s"] = self._counted / elapsed
        self.restart()
        return figures


def loaders_needed(workers: int, waited: float, elapsed: float, host: float) -> int:
    """Return the data workers per rank with which fetching takes no longer than computing.

    Without workers, the host fetches while it waits. With workers, all of them fetched all the time, else training
    would not have waited.

    Args:
        workers: of a rank now.
        waited, elapsed, host: seconds in which training waited for data, in all, and in which the host did (on a GPU
            maybe longer than training), over the same steps.
    """
    fetching = workers * elapsed if workers else host
    return math.ceil(fetching / max(elapsed - waited, 1e-3 * elapsed) - 1e-9)


class WaitAdvice:
    """Observes on rank 0 how much training waits for data, and says what helps, once."""

    def __init__(self, name: str, workers: int, ranks: int) -> None:
        """
        Args:
            name: of the run.
            workers: data workers of a rank.
            ranks: on this machine.
        """
        self._name, self._workers, self._ranks = name, workers, ranks
        self._waited = self._elapsed = self._host = 0.0
        self._first: tuple[float, float, float] | None = None
        self._is_given = False

    def add(self, waited: float, elapsed: float, host: float) -> None:
        """Add a stretch of training, in seconds, as in `loaders_needed`. The first stretch counts only if there is no
        other one, because it includes starting."""
        if self._first is None:
            self._first = waited, elapsed, host
            return
        self._waited += waited
        self._elapsed += elapsed
        self._host += host

    def text(self, is_last: bool) -> str:
        """Return the advice, once, if there is a reason for it; else ''."""
        waited, elapsed, host = self._waited, self._elapsed, self._host
        if is_last and not elapsed:
            waited, elapsed, host = self._first or (0.0, 0.0, 0.0)
        if self._is_given or elapsed < (_SHORT if is_last else _LONG) or waited <= _WAITING * elapsed:
            return ""
        self._is_given = True
        return self._advise(waited, elapsed, host)

    def _advise(self, waited: float, elapsed: float, host: float) -> str:
        workers, usable = self._workers, cores.per_rank(1)
        text, wish = f"training waits {waited / elapsed:.0%} for data", loaders_needed(workers, waited, elapsed, host)
        better = min(wish, max(usable // self._ranks, 1), _MOST_ADVISED)
        if better <= workers:
            has = f"{workers} data worker{'' if workers == 1 else 's'}"
            return (
                f"{text}: each rank has {has} on its share of {usable} cores; make samples cheaper to read "
                "(smaller files, decoded and resized beforehand, a faster disk)"
            )
        rest = f"; {wish} would be enough, on more cores than {usable}" if better < min(wish, _MOST_ADVISED) else ""
        return (
            f"{text}: raise data.workers to {better} (train stop {self._name}, then train resume {self._name} "
            f"--data.workers {better}; the result stays the same{rest})"
        )

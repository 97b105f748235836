"""Speed and memory since the last line, and the clock of the checkpoints."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

import torch

from train.engine.awaited import Awaited
from train.engine.wait import DataWait
from train.record.metrics import Speed


class Clock:
    """Says when so many minutes have passed since the last save. Rank 0's clock decides for all."""

    def __init__(self, minutes: float, since: float = 0.0, now: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            since: seconds that have passed since the last save already.
        """
        self._seconds, self._now = minutes * 60, now
        self._since = now() - since

    def restart(self) -> None:
        self._since = self._now()

    def is_due(self) -> bool:
        return self._seconds > 0 and self._now() - self._since >= self._seconds


class Meter:
    """Speed since the last line."""

    def __init__(self, wait: DataWait, device: torch.device) -> None:
        self.wait, self.awaited = wait, Awaited(device)
        self.empty = 0
        """Steps in a row of which no sample could be read."""
        self.restart()

    def restart(self) -> None:
        self._since = time.perf_counter()
        self._waited, self._fetched = self.awaited.seconds(), self.awaited.host
        self.samples = self.steps = 0

    def read(self, device: torch.device) -> Speed:
        """The speed of the steps since the last call, and the memory."""
        waited, fetched = self.awaited.seconds() - self._waited, self.awaited.host - self._fetched
        self.wait.add(waited, self._elapsed(), fetched)
        elapsed, steps = self._elapsed(), max(self.steps, 1)
        if device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(device)
        else:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        figures: Speed = {
            "samples_per_s": self.samples / elapsed,
            "data_wait": waited / steps,
            "step_time": elapsed / steps,
            "memory": memory,
        }
        self.restart()
        return figures

    def _elapsed(self) -> float:
        return max(time.perf_counter() - self._since, 1e-9)

"""Speed and memory since the last line, and the clock of the checkpoints."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

import torch

from train.engine.wait import DataWait


class Clock:
    """Says when so many minutes have passed since the last save. Rank 0's clock decides for all."""

    def __init__(self, minutes: float, now: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._now = minutes * 60, now
        self.restart()

    def restart(self) -> None:
        self._since = self._now()

    def is_due(self) -> bool:
        return self._seconds > 0 and self._now() - self._since >= self._seconds


class Meter:
    """Speed since the last line."""

    def __init__(self, wait: DataWait) -> None:
        self.wait = wait
        self.empty = 0
        """Steps in a row of which no sample could be read."""
        self.restart()

    def restart(self) -> None:
        self._since = time.perf_counter()
        self.waited = 0.0
        self.samples = self.steps = 0

    def read(self, device: torch.device) -> dict[str, float]:
        """samples_per_s; data_wait and step_time in seconds per step; memory in bytes, the highest so far."""
        elapsed = max(time.perf_counter() - self._since, 1e-9)
        steps = max(self.steps, 1)
        self.wait.add(self.waited, elapsed)
        if device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(device)
        else:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        figures = {
            "samples_per_s": self.samples / elapsed,
            "data_wait": self.waited / steps,
            "step_time": elapsed / steps,
            "memory": memory,
        }
        self.restart()
        return figures

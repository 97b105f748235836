"""Where the time of an attempt goes, by the clock of one rank from the moment it was ready, and the speed of steps."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Iterator

import torch

from train.run.metrics import Speed
from train.run.record import Times
from train.trainer.cpu import WaitAdvice
from train.trainer.prefetch import DataWait


class Timing:
    """Seconds of each part of training, each counted once, and the speed since the last line of metrics.

    What is in no part is computing.
    """

    def __init__(self, wait: DataWait, advice: WaitAdvice, device: torch.device) -> None:
        self.wait, self.advice, self._device = wait, advice, device
        self._began = time.perf_counter()
        self._parts = {"start": 0.0, "checkpoints": 0.0, "evaluation": 0.0}
        self.restart()

    @contextlib.contextmanager
    def spent(self, part: str) -> Iterator[None]:
        """Around what belongs to a part: start, checkpoints or evaluation; never one inside another."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._parts[part] += time.perf_counter() - began

    def times(self, step: int, communication: float | None) -> Times:
        """All parts up to now.

        Args:
            step: the last one that was made.
            communication: seconds of it; None where it cannot be separated from computing.
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

    def restart(self) -> None:
        """Measure the speed from now on."""
        self._since = time.perf_counter()
        self._waited, self._fetched = self.wait.seconds(), self.wait.host
        self._samples = self._steps = 0

    def speed(self) -> Speed:
        """The speed of the steps since the last call, and the memory."""
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
        self.restart()
        return figures

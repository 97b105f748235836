"""The time between moments: on a CPU by the clock of the host, on a GPU between events of its stream.

The host runs ahead of a GPU, and its clock says nothing of what happens there. Nobody waits for an event: what lies
between two of them is counted once the GPU has come past both.
"""

from __future__ import annotations

import collections
import time
from typing import Any

import torch


class Moments:
    """Seconds, summed over pairs of moments of one device."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._seconds = 0.0
        self._pending: collections.deque[tuple[int, Any, Any]] = collections.deque()
        self._free: list[Any] = []
        """Events that have served: to make one costs as much as to record it."""

    def mark(self) -> Any:
        """This moment: on a GPU that at which it comes to what is asked of it from now on. For one `add`."""
        if not self._is_cuda:
            return time.perf_counter()
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, begun: Any, ended: Any, weight: int = 1) -> None:
        """Count what lies between two marks, so many times."""
        if self._is_cuda:
            self._pending.append((weight, begun, ended))
            self._take()  # not all ranks ask how long it took
        else:
            self._seconds += weight * (ended - begun)

    def drop(self, mark: Any) -> None:
        """Of a mark that is not to be counted."""
        if self._is_cuda:
            self._free.append(mark)

    def seconds(self) -> float:
        """Up to now; of a GPU as far as it has come, for this waits for nothing."""
        self._take()
        return self._seconds

    def _take(self) -> None:
        """Count what a GPU has come past."""
        while self._pending and self._pending[0][2].query():
            weight, begun, ended = self._pending.popleft()
            self._seconds += weight * begun.elapsed_time(ended) / 1e3
            self._free += begun, ended

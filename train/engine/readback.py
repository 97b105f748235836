"""The sums of a step on their way from the device to the host."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
"""What the sums belong to."""


class Readback(Generic[T]):
    """Brings the sums of a step to the host: at once from a CPU, a step later from a GPU, so that it never waits."""

    def __init__(self, device: torch.device) -> None:
        self._lag = 1 if device.type == "cuda" else 0
        self._pending: collections.deque[tuple[T, Tensor, Any]] = collections.deque()

    def put(self, step: T, sums: Tensor) -> None:
        event = None
        if self._lag:
            sums = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True).copy_(sums, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._pending.append((step, sums, event))

    def take(self, everything: bool) -> Iterator[tuple[T, list[float]]]:
        while len(self._pending) > (0 if everything else self._lag):
            step, sums, event = self._pending.popleft()
            if event is not None:
                event.synchronize()
            yield step, sums.tolist()

"""How long training stands still because the next batch is not there yet.

On a CPU that is as long as the host waits. On a GPU it is not: the host runs ahead, and while it waits the GPU may
still be busy with the step before. There it is the time from the end of all that was asked of the GPU until the batch
has come, before it is copied: to an event that is recorded then the GPU comes at once if it had nothing else to do, and
else when it has done it, as to the one before.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from train.parallel.overlap import DeviceTimer

_LEAST = 20e-6
"""Seconds; what the host waits shorter than this on a GPU counts as nothing, for an event costs some of them."""


class Awaited:
    """Seconds of one rank, over all batches that it has trained with:

    begin()         before the next batch is asked for
    arrived()       it has been fetched; called by the loader
    end()           it is on the device, or on its way
    """

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self._now, self._moments = now, DeviceTimer(device) if device.type == "cuda" else None
        self.host = 0.0
        """In which the host waited. Without loader processes that is what fetching takes."""
        self._began: float | None = None
        """When the batch was asked for; None: none is asked for, or it has arrived."""

    def begin(self) -> None:
        if self._moments is not None:
            self._idle = self._moments.mark()
        self._began = self._now()

    def arrived(self) -> None:
        if self._moments is None or self._began is None:  # of an evaluation
            return
        waited, self._began = self._now() - self._began, None
        self.host += waited
        if waited < _LEAST:
            self._moments.drop(self._idle)
        else:
            self._moments.add(self._idle, self._moments.mark())

    def end(self) -> None:
        if self._began is not None:
            self.host += self._now() - self._began
            self._began = None

    def seconds(self) -> float:
        """In which nothing was computed for want of data, up to now; of a GPU as far as it has come."""
        return self.host if self._moments is None else self._moments.seconds()

"""The micro batches that a rank computes, fetched ahead of the step, and how long training waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ..data.loader import Loader
from ..data.plan import MicroBatch, Plan, Sharing, evaluation_micro_batches, micro_batches_of
from ..parallel.overlap import DeviceTimer
from .intervals import Intervals

_LOOK_AHEAD = 4096
"""Number of steps in which the next evaluation is searched at a time."""
_LEAST = 20e-6
"""Seconds below which a wait of the host does not count on a GPU, because an event costs as much."""


class Prefetch:
    """The micro batches of a rank with their data, on the device, in the order in which the loop takes them."""

    def __init__(self, loader: Loader, micros: Iterator[MicroBatch], wait: DataWait) -> None:
        self._wait = wait
        self.batches = loader.batches(micros, wait.arrived)
        """All batches. What an evaluation takes from here does not count as waiting."""

    def next(self) -> tuple[MicroBatch, Any]:
        """Return the next micro batch for training."""
        self._wait.begin()
        return next(self.batches)


def micro_batches(
    intervals: Intervals, plan: Plan, evaluations: Mapping[str, Plan], sharing: Sharing, *, done: int, evaluated: int
) -> Iterator[MicroBatch]:
    """Yield all micro batches that a rank fetches after step `done`, with evaluations, in the order of the loop.

    Args:
        evaluations: the plans of the evaluation sets by name.
        evaluated: the last step after which an evaluation is on record; -1 without one.
    """
    first = done
    for step in range(done, intervals.total_steps + 1):
        is_evaluated = evaluated < step and intervals.evaluates(step)
        if is_evaluated or step - first == _LOOK_AHEAD:
            yield from micro_batches_of(plan, sharing, first=first, last=step)
            first = step
        if is_evaluated:
            for number, evaluation in enumerate(evaluations.values(), 1):
                yield from evaluation_micro_batches(
                    evaluation, sharing, evaluation=number, step=step - 1, epoch=plan.epoch(max(step - 1, 0))
                )
    yield from micro_batches_of(plan, sharing, first=first, last=intervals.total_steps)


class DataWait:
    """Seconds in which one rank waited for the batches that it trained with.

    begin()         before the next batch is requested
    arrived()       it has been fetched; called by the loader

    On a CPU that is as long as the host waits. A GPU may still compute the step before while the host waits, so there
    the time runs from the end of all queued work until the batch has come, between two events on the device.
    """

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self._now, self._timer = now, DeviceTimer(device) if device.type == "cuda" else None
        self.host = 0.0
        """Seconds in which the host waited. Without data workers that is the time of fetching."""
        self._began: float | None = None
        """When the batch was requested; None once it has arrived."""

    def begin(self) -> None:
        if self._timer is not None:
            self._idle = self._timer.mark()
        self._began = self._now()

    def arrived(self) -> None:
        if self._began is None:  # of an evaluation
            return
        waited, self._began = self._now() - self._began, None
        self.host += waited
        if self._timer is None:
            return
        if waited < _LEAST:
            self._timer.drop(self._idle)
        else:
            self._timer.add(self._idle, self._timer.mark())

    def seconds(self) -> float:
        """Return the seconds in which nothing was computed because data were missing; on a GPU up to its finished
        work."""
        return self.host if self._timer is None else self._timer.seconds()

"""Batches that reach the device while it computes with those before them."""

from __future__ import annotations

import collections
from collections.abc import Iterator

import torch
from torch import Tensor

from tests.gpu.harness import FAILED, OK, UNCHECKED, Case, Row, Scale, mebibytes
from train.data.to_device import AsyncCopies, prepared

_WHAT = "batches copied while the device computes"
_SIZE, _STEPS = 32 << 20, 24
_CYCLES = 10_000_000
_LEAST_HIDDEN = 0.7
"""Of what copies take, which must not take time of their own."""


def cases(scale: Scale) -> Iterator[Case]:
    """Large batches, and steps that take twice as long as their copies."""
    yield Case(_WHAT, 2, _overlap, (scale,))


def _overlap(scale: Scale) -> Row:
    if not scale.is_gpu:
        return Row(_WHAT, "a CPU copies nothing to itself", UNCHECKED)
    copying, cycle = _seconds_of_a_copy(scale), _seconds_of_a_cycle()
    cycles = int(2 * copying / cycle)
    alone, _ = _steps(scale, cycles, None)
    beside, sums = _steps(scale, cycles, AsyncCopies(scale.place))
    wrong = [number for number, found in enumerate(sums) if found != number * _SIZE]
    if wrong:
        return Row(_WHAT, f"of {_STEPS}, these had another's content: {wrong}", FAILED, "each its own")
    hidden = (alone - beside) / copying
    found = f"{hidden:.0%} of the {1000 * copying:.1f} ms that {mebibytes(_SIZE)} take, and each has its own content"
    figures = {"copy_s": copying, "step_s": beside, "step_in_turn_s": alone, "hidden": hidden}
    return Row(_WHAT, found, OK if hidden >= _LEAST_HIDDEN else FAILED, f"{_LEAST_HIDDEN:.0%}", figures)


def _steps(scale: Scale, cycles: int, copies: AsyncCopies | None) -> tuple[float, list[float]]:
    """Seconds a step, and what each found its batch to add up to. The host is a step ahead, as it is in a run."""
    batches = [torch.full((_SIZE,), number, dtype=torch.uint8).pin_memory() for number in range(_STEPS)]
    sums, ends, marks = list[Tensor](), collections.deque[torch.cuda.Event](), list[torch.cuda.Event]()
    for number in range(_STEPS):
        batch = prepared(batches[number], 0, scale.place, None, False, None, (), copies)
        torch.cuda._sleep(cycles)
        sums.append(batch.sum(dtype=torch.float64))
        del batch
        marks.append(_mark())
        ends.append(marks[-1])
        if len(ends) > 1:
            ends.popleft().synchronize()
    torch.cuda.synchronize()
    first = 4  # memory has been found by then
    return marks[first].elapsed_time(marks[-1]) / 1e3 / (_STEPS - 1 - first), [one.item() for one in sums]


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds_of_a_copy(scale: Scale) -> float:
    here = torch.ones(_SIZE, dtype=torch.uint8).pin_memory()
    there = torch.empty_like(here, device=scale.device)
    there.copy_(here, non_blocking=True)
    begun = _mark()
    for _ in range(8):
        there.copy_(here, non_blocking=True)
    ended = _mark()
    ended.synchronize()
    return begun.elapsed_time(ended) / 1e3 / 8


def _seconds_of_a_cycle() -> float:
    torch.cuda._sleep(_CYCLES)  # the first one wakes it
    begun = _mark()
    torch.cuda._sleep(_CYCLES)
    ended = _mark()
    ended.synchronize()
    return begun.elapsed_time(ended) / 1e3 / _CYCLES

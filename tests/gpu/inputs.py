"""Batches on their way to the device: copied whole while it computes; and the advice of a run that waits for them."""

from __future__ import annotations

import collections
import json
from collections.abc import Iterator

import torch
from torch import Tensor

from tests.gpu.harness import FAILED, OK, UNCHECKED, Case, Row, Scale, mebibytes, new_run, train_here
from train.data.to_device import AsyncCopies, prepared

_COPIED = "batches copied while the device computes"
_SLOWER, _HIDDEN = "a loader slower than the device", "batches fetched while the device computes"
_SIZE, _BATCHES, _READY = 32 << 20, 24, 4
"""Bytes of a batch, how many there are, and how many steps find memory before time is taken."""
_CYCLES = 100_000_000
"""To see how many of its cycles the device makes in a second."""
_LEAST_HIDDEN = 0.7
"""Of what copies take, which must not take time of their own."""


def part(scale: Scale) -> Iterator[Case]:
    """Large batches copied; a loader slower than the device; one for which the host waits while the device computes."""
    yield Case(_COPIED, _copied, (scale,))
    yield Case(_SLOWER, _slower, (scale,))
    yield Case(_HIDDEN, _hidden, (scale,))


def _copied(scale: Scale) -> Row:
    """Steps that take twice as long as the copy of their batch, with copies in turn and beside."""
    if not scale.is_gpu:
        return Row(_COPIED, "a CPU copies nothing to itself", UNCHECKED)
    copying = _seconds_of_a_copy(scale)
    cycles = int(2 * copying * _cycles_a_second())
    alone, _ = _steps(scale, cycles, None)
    beside, sums = _steps(scale, cycles, AsyncCopies(scale.place))
    wrong = [number for number, found in enumerate(sums) if found != number * _SIZE]
    if wrong:
        return Row(_COPIED, f"of {_BATCHES}, these had another's content: {wrong}", FAILED, "each its own")
    hidden = (alone - beside) / copying
    found = f"{hidden:.0%} of the {1000 * copying:.1f} ms that {mebibytes(_SIZE)} take, and each has its own content"
    figures = {"copy_s": copying, "step_s": beside, "step_in_turn_s": alone, "hidden": hidden}
    return Row(_COPIED, found, OK if hidden >= _LEAST_HIDDEN else FAILED, f"{_LEAST_HIDDEN:.0%}", figures)


def _steps(scale: Scale, cycles: int, copies: AsyncCopies | None) -> tuple[float, list[float]]:
    """Seconds a step, and what each found its batch to add up to. The host is a step ahead, as it is in a run."""
    batches = [torch.full((_SIZE,), number, dtype=torch.uint8).pin_memory() for number in range(_BATCHES)]
    sums, ends, marks = list[Tensor](), collections.deque[torch.cuda.Event](), list[torch.cuda.Event]()
    for number in range(_BATCHES):
        batch = prepared(
            batches[number],
            0,
            device=scale.place,
            dtype=None,
            channels_last=False,
            on_device=None,
            own=(),
            copies=copies,
        )
        torch.cuda._sleep(cycles)
        sums.append(batch.sum(dtype=torch.float64))
        del batch
        marks.append(_mark())
        ends.append(marks[-1])
        if len(ends) > 1:
            ends.popleft().synchronize()
    return _seconds(marks[_READY], marks[-1]) / (_BATCHES - 1 - _READY), [one.item() for one in sums]


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(begun: torch.cuda.Event, ended: torch.cuda.Event) -> float:
    ended.synchronize()
    return begun.elapsed_time(ended) / 1e3


def _seconds_of_a_copy(scale: Scale) -> float:
    here = torch.ones(_SIZE, dtype=torch.uint8).pin_memory()
    there = torch.empty_like(here, device=scale.device)
    there.copy_(here, non_blocking=True)
    begun = _mark()
    for _ in range(8):
        there.copy_(here, non_blocking=True)
    return _seconds(begun, _mark()) / 8


def _cycles_a_second() -> float:
    """Once its clock rises no more: that of an idle device takes some tenths of a second to come to its height."""
    rate = 0.0
    for _ in range(20):
        begun = _mark()
        torch.cuda._sleep(_CYCLES)
        before, rate = rate, _CYCLES / _seconds(begun, _mark())
        if before and rate < 1.02 * before:
            break
    return rate


def _slower(scale: Scale) -> Row:
    # 40 of 60 ms; a CPU may be slow to begin with
    least, most = (0.5, 0.75) if scale.is_gpu else (0.3, 1.0)
    share, advice = _waited(scale, fetch=0.06, compute=0.02)
    is_right = bool(advice) and least < share < most
    return Row(_SLOWER, f"{share:.0%} of a step; {advice}", OK if is_right else FAILED, "about 67%, said")


def _hidden(scale: Scale) -> Row:
    """The host waits for data two thirds of the time; on a GPU only what it does not compute meanwhile counts."""
    if not scale.is_gpu:
        return Row(_HIDDEN, "a CPU computes nothing while it fetches", UNCHECKED)
    share, advice = _waited(scale, fetch=0.04, compute=0.06)
    is_right = not advice and share < 0.05
    return Row(_HIDDEN, f"{share:.0%} of a step; {advice}", OK if is_right else FAILED, "0%, nothing said")


def _waited(scale: Scale, fetch: float, compute: float) -> tuple[float, str]:
    """The share of a step that was lost to waiting, in the last line of a run, and the advice of the run.

    Args:
        fetch, compute: seconds a step.
    """
    flags = scale.flags("slow") | {"steps": 50, "log.every_steps": 25}  # two lines, of which the first does not count
    cycles = _cycles_a_second() if scale.is_gpu else 1.0
    flags |= {"task.fetch": fetch / flags["batch_size"], "task.compute": compute * cycles}
    with new_run(scale, "slow", flags) as run:
        train_here(run)
        line = json.loads(run.metrics.read_text(encoding="utf-8").splitlines()[-1])
        return line["data_wait"] / line["step_time"], str(run.read()["data_wait"])

"""Batches on their way to the device: the advice of a run that waits for them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import torch

from tests.gpu.harness import FAILED, OK, UNCHECKED, Case, Row, Scale, new_run, train_here

_SLOWER, _HIDDEN = "a loader slower than the device", "batches fetched while the device computes"
_CYCLES = 100_000_000
"""To see how many of its cycles the device makes in a second."""


def part(scale: Scale) -> Iterator[Case]:
    """A loader slower than the device; one for which the host waits while the device computes."""
    yield Case(_SLOWER, _slower, (scale,))
    yield Case(_HIDDEN, _hidden, (scale,))


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(begun: torch.cuda.Event, ended: torch.cuda.Event) -> float:
    ended.synchronize()
    return begun.elapsed_time(ended) / 1e3


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

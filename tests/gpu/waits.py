"""What is said of waiting for data: on a GPU only what it does not compute meanwhile counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch

from tests.gpu.harness import FAILED, OK, UNCHECKED, Case, Row, Scale, passing, train_here

STEPS, LINES = 50, 25
"""Of a run; and after how many there is a line, of which the first does not count."""
_SLOWER, _HIDDEN = "a loader slower than the device", "batches fetched while the device computes"
_CYCLES = 100_000_000
"""To see how many of its cycles the device makes in a second."""


def cases(scale: Scale) -> Iterator[Case]:
    """A loader that is slower than the device; and one that the host waits for for two thirds of the time, while the
    device computes."""
    yield Case(_SLOWER, 6, _slower, (scale,))
    yield Case(_HIDDEN, 6, _hidden, (scale,))


def _slower(scale: Scale) -> Row:
    share, advice = _waited(scale, fetch=0.06, compute=0.02)
    # 40 of 60 ms; a CPU may be slow to begin with
    is_right = bool(advice) and (0.5 if scale.is_gpu else 0.3) < share < (0.75 if scale.is_gpu else 1.0)
    found = f"{share:.0%} of a step; {advice or 'no word of it'}"
    return Row(_SLOWER, found, OK if is_right else FAILED, "about 67%, said")


def _hidden(scale: Scale) -> Row:
    if not scale.is_gpu:
        return Row(_HIDDEN, "a CPU computes nothing while it fetches", UNCHECKED)
    share, advice = _waited(scale, fetch=0.04, compute=0.06)
    is_right = not advice and share < 0.05
    found = f"{share:.0%} of a step; {advice or 'no word of it'}"
    return Row(_HIDDEN, found, OK if is_right else FAILED, "0%, nothing said")


def _waited(scale: Scale, fetch: float, compute: float) -> tuple[float, str]:
    """Which share of a step was lost to waiting, in the last line of a run, and what was said of it.

    Args:
        fetch, compute: seconds a step.
    """
    flags: dict[str, Any] = {
        "device": scale.device, "log.tensorboard": "false", "data.workers": 0, "checkpoint.every_minutes": 0,
        "batch_size": 2, "steps": STEPS, "log.every_steps": LINES, "eval.every_epochs": 0, "optim.lr": 0.01,
        "task.fetch": fetch / 2, "task.compute": compute * (_cycles_a_second() if scale.is_gpu else 1.0),
    }  # fmt: skip
    with passing(scale, "slow", flags) as run:
        train_here(run)
        line = json.loads(run.metrics.read_text(encoding="utf-8").splitlines()[-1])
        return line["data_wait"] / line["step_time"], str(run.read()["data_wait"])


def _cycles_a_second() -> float:
    """Once its clock rises no more: that of an idle device takes some tenths of a second to come to its height."""
    rate = 0.0
    for _ in range(20):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        torch.cuda._sleep(_CYCLES)
        ended.record()
        ended.synchronize()
        before, rate = rate, _CYCLES / (begun.elapsed_time(ended) / 1e3)
        if before and rate < 1.02 * before:
            break
    return rate

"""No step waits for the device, and a run on the CPU leaves the devices alone."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.gpu.harness import FAILED, OK, UNCHECKED, Row, Scale, exact_flags, made, train_here

FIRST, LAST = 4, 16
"""Between the ends of these steps nothing may wait: before them kernels are chosen and memory is found."""

_ON_CPU = """
import sys, torch
from pathlib import Path
from tests.gpu.harness import Scale, exact_flags, hush, made, train_here
hush()
scale = Scale("cpu", True, 0, Path(sys.argv[1]))
scale.folder.mkdir()
train_here(made(scale, "digits", exact_flags(scale, "digits") | {"steps": 10}))
print("opened" if torch.cuda.is_initialized() else "left alone")
"""


def part(scale: Scale) -> Iterator[Row]:
    """Every task in every precision; and a run with --device cpu."""
    for task in ("digits", "resnet", "gpt"):
        for precision in scale.precisions(task):
            flags = exact_flags(scale, task) | {"precision": precision, "steps": LAST + 4, "log.every_steps": 5}
            del flags["checkpoint.every_steps"]
            yield _unwatched(scale, task, precision, flags)
    yield _on_cpu(scale)


def _unwatched(scale: Scale, task: str, precision: str, flags: dict[str, Any]) -> Row:
    """Train with every synchronisation between two steps an error."""
    what = f"no wait in a step: {task}, {precision}"
    numbers = itertools.count(1)

    def after_step(*_: object) -> None:
        number = next(numbers)
        if number == FIRST and scale.is_gpu:
            torch.cuda.set_sync_debug_mode("error")
        if number == LAST and scale.is_gpu:
            torch.cuda.set_sync_debug_mode("default")

    handle = register_optimizer_step_post_hook(after_step)
    try:
        train_here(made(scale, task, flags))
    except RuntimeError as error:
        return Row(what, str(error)[:300], FAILED)
    finally:
        handle.remove()
        if scale.is_gpu:
            torch.cuda.set_sync_debug_mode("default")
    counted = next(numbers) - 1
    if counted < LAST:
        return Row(what, f"only {counted} steps were seen", FAILED)
    if not scale.is_gpu:
        return Row(what, f"{counted} steps counted; a CPU has nothing to wait for", UNCHECKED)
    return Row(what, f"none in {LAST - FIRST} steps", OK, "none")


def _on_cpu(scale: Scale) -> Row:
    what = "--device cpu opens no device"
    done = subprocess.run(
        [sys.executable, "-c", _ON_CPU, str(scale.folder / "on-cpu")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    said = done.stdout.strip().splitlines()[-1:] or [done.stderr.strip()[-300:]]
    if not scale.is_gpu and said == ["left alone"]:
        return Row(what, "there is none here", UNCHECKED)
    return Row(what, said[0], OK if said == ["left alone"] else FAILED)

"""No step waits for the device, and a run on the CPU leaves the devices alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.gpu.harness import FAILED, OK, UNCHECKED, Row, Scale, exact_flags, passing, train_here
from train.data import loader

FIRST, LAST = 4, 16
"""Between the ends of these steps nothing may wait. Before them kernels are chosen, memory is found, and the engine
waits on purpose, as it does before a save: to see whether a forward changes the model."""
HELD = 11
"""After this step the device is kept busy. Lines are written after others, each fifth."""
CYCLES = 1_000_000_000
"""For so many of its cycles, half a second or more: a step takes the host a twentieth of it."""

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
            if scale.is_gpu and task == "resnet":
                # about a thousand kernels can wait for a device, then who starts them waits: a ResNet-50 has as many
                flags["task.depth"] = 14
            yield _unwatched(scale, task, precision, flags)
    yield _on_cpu(scale)


class Watch:
    """What is seen of the steps of a run: which of them waited, and whether its batches came from pinned memory."""

    def __init__(self, is_gpu: bool) -> None:
        self.counted = self.host = self.pinned = 0
        self.is_ahead = False
        """Whether the host came to the end of a step while the device was still held in the one before."""
        self._is_gpu = is_gpu
        self._held: Any = None

    def after_step(self, *_: object) -> None:
        self.counted += 1
        if not self._is_gpu:
            return
        if self.counted == FIRST:
            torch.cuda.set_sync_debug_mode("error")
        if self.counted == HELD:
            torch.cuda._sleep(CYCLES)
            self._held = torch.cuda.Event()
            self._held.record()
        if self.counted == HELD + 1:
            self.is_ahead = not self._held.query()
        if self.counted == LAST:
            torch.cuda.set_sync_debug_mode("default")

    def prepared(self, batch: Any, *rest: Any) -> Any:
        """In the place of the loader's function of this name, which takes batches to the device."""
        for tensor in batch:
            if isinstance(tensor, Tensor):
                self.host += tensor.device.type == "cpu"
                self.pinned += self._is_gpu and tensor.is_pinned()
        return _PREPARED(batch, *rest)

    def problem(self) -> str:
        """What does not hold, in a line; '' if all does."""
        if self.counted < LAST:
            return f"only {self.counted} steps were seen"
        if not self.host:
            return "no batch was seen on its way to the device"
        if self._is_gpu and self.pinned < self.host:
            return f"{self.host - self.pinned} of {self.host} tensors were not in pinned memory: such copies wait"
        if self._is_gpu and not self.is_ahead:
            return f"the host did not come through step {HELD + 1} while the device was held after step {HELD}"
        return ""


_PREPARED = loader.prepared


def _unwatched(scale: Scale, task: str, precision: str, flags: dict[str, Any]) -> Row:
    """Train with every synchronisation that torch knows of an error, and once with a device that is held.

    torch knows of no wait for an event, no torch.cuda.synchronize and no copy from memory that is not pinned; the host
    that goes on while the device stands still has made none of them.
    """
    what = f"no wait in a step: {task}, {precision}"
    watch = Watch(scale.is_gpu)
    handle = register_optimizer_step_post_hook(watch.after_step)
    try:
        with mock.patch.object(loader, "prepared", watch.prepared), passing(scale, task, flags) as run:
            train_here(run)
    except RuntimeError as error:
        return Row(what, str(error)[:300], FAILED)
    finally:
        handle.remove()
        if scale.is_gpu:
            torch.cuda.set_sync_debug_mode("default")
    problem = watch.problem()
    if problem:
        return Row(what, problem, FAILED)
    if not scale.is_gpu:
        return Row(what, f"{watch.counted} steps counted; a CPU has nothing to wait for", UNCHECKED)
    found = f"none that torch knows of in {LAST - FIRST} steps, none of any kind in one; all batches from pinned memory"
    return Row(what, found, OK, "none")


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

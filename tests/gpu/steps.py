"""No step waits for the device, and a run on the CPU leaves the devices alone."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.gpu.harness import FAILED, OK, UNCHECKED, Case, Row, Scale, alone, new_run, snapshots, train_here
from train.checkpoint.buffers import SnapshotMemory
from train.data import loader
from train.parallel.precision import ON_GPU_ALONE

FIRST, LAST = 4, 16
"""Between the ends of these steps nothing may wait. Before them kernels are chosen, memory is found, and the engine
waits on purpose, as it does before a save: to see whether a forward changes the model."""
HELD = 11
"""After this step the device is busy for a while. Lines are written after others, each fifth."""
CYCLES = 1_000_000_000
"""So many of its cycles, half a second or more: a step takes the host a twentieth of it."""

_ON_CPU_WHAT = "--device cpu opens no device"
_ON_CPU = """
import sys, torch
from pathlib import Path
from tests.gpu.harness import Scale, new_run, train_here
scale = Scale("cpu", True, 0, Path(sys.argv[1]))
scale.folder.mkdir()
with new_run(scale, "fake", scale.exact_flags("fake") | {"steps": 10}) as run:
    train_here(run)
# torch's own flag knows of no context that something beside torch has made; asked of all, for each has one of its own
has_context = getattr(torch._C, "_cuda_hasPrimaryContext", lambda n: False)
opened = [n for n in range(torch.cuda.device_count()) if has_context(n)]
print(f"it has opened {opened}" if opened or torch.cuda.is_initialized() else "left alone")
"""

WORKERS, MICRO = "2 loader processes", "2 micro batches, clipped"
SPREAD = {"ddp": "ddp of one rank", "fsdp": "fsdp of one rank"}
MEMORY = "snapshots in memory all the time"
CASES = (
    ("gpt", "bf16", (MEMORY,)), ("gpt", "fp16", (SPREAD["ddp"], MICRO)), ("gpt", "bf16", (SPREAD["fsdp"],)),
    ("own", "bf16", (MEMORY,)), ("resnet", "bf16", (WORKERS,)), ("resnet", "fp16", (MEMORY,)),
    ("gpt", "bf16", (SPREAD["ddp"],)), ("gpt", "fp16", (MICRO,)), ("gpt", "tf32", ()), ("resnet", "fp32", ()),
)  # fmt: skip
"""Task, precision, and what else a step has to do; what shows most first. The task `own` has state of its own.

Not more micro batches: about a thousand kernels can wait for a device that is held, then who starts them waits."""


def part(scale: Scale) -> Iterator[Case]:
    """Every task and precision, with all that is in the way between two steps; and a run with --device cpu."""
    for task, precision, rest in CASES:
        if scale.is_gpu or precision not in ON_GPU_ALONE:
            what = f"no wait in a step: {', '.join((task, precision, *rest))}"
            yield Case(what, _unwatched, (scale, task, what, flags(scale, task, precision, rest), rest))
    yield Case(_ON_CPU_WHAT, _on_cpu, (scale,))


def flags(scale: Scale, task: str, precision: str, rest: tuple[str, ...]) -> dict[str, Any]:
    given = scale.exact_flags(task) | {"precision": precision, "steps": LAST + 4, "log.every_steps": 5}
    if scale.is_gpu and task == "resnet":
        given["task.depth"] = 14  # a ResNet-50 has about a thousand kernels
    if WORKERS in rest:
        given["data.workers"] = 2
    if MICRO in rest:
        given |= {"micro_batch_size": given["batch_size"] // 2, "clip_grad_norm": 1.0}
    if SPREAD["fsdp"] in rest:
        given |= {"parallel.strategy": "fsdp", "parallel.wrap": "Block"}
    return given


class Watch:
    """What is seen of the steps of a run: which of them waited, and whether its batches came from pinned memory."""

    def __init__(self, is_gpu: bool) -> None:
        self.counted = self.host = self.pinned = 0
        self.is_ahead = False
        """Whether the host came to the end of a step while the device was still held in the one before."""
        self._is_gpu = is_gpu
        self._held: Any = None
        self.memory: SnapshotMemory | None = None
        """Of the snapshots, if there are any."""
        self.kept = 0
        """The step of the newest one when nothing may wait any more."""

    def after_step(self, *_: object) -> None:
        self.counted += 1
        if self.counted == LAST and self.memory is not None:
            self.kept = self.memory.step
        if not self._is_gpu:
            return
        if self.counted in (2, FIRST):  # memory for snapshots is taken, then locked, once in a run's life
            for thread in threading.enumerate():
                if thread.name.startswith("reserve") or thread.name == "snapshot":
                    thread.join()
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

    def prepared(self, batch: Any, *rest: Any, **settings: Any) -> Any:
        """In the place of the loader's function of this name, which takes batches to the device."""
        for tensor in batch:
            if isinstance(tensor, Tensor):
                self.host += tensor.device.type == "cpu"
                self.pinned += self._is_gpu and tensor.is_pinned()
        return _PREPARED(batch, *rest, **settings)

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
        if self.memory is not None and self.kept < FIRST:
            return f"no snapshot was taken meanwhile: the newest is of step {self.kept}"
        return ""


_PREPARED = loader.prepared


def _unwatched(scale: Scale, task: str, what: str, given: dict[str, Any], rest: tuple[str, ...]) -> Row:
    """Train with every synchronisation that torch knows of an error, and once with a device that is held.

    torch knows of no wait for an event, no torch.cuda.synchronize and no copy from memory that is not pinned; the host
    that goes on while the device stands still has made none of them.
    """
    watch = Watch(scale.is_gpu)
    handle = register_optimizer_step_post_hook(watch.after_step)
    try:
        with contextlib.ExitStack() as held:
            held.enter_context(mock.patch.object(loader, "prepared", watch.prepared))
            run = held.enter_context(new_run(scale, task, given))
            for strategy, words in SPREAD.items():
                if words in rest:
                    held.enter_context(alone(scale, strategy))
            if MEMORY in rest:
                watch.memory = held.enter_context(snapshots())
            train_here(run)
    finally:
        handle.remove()
    problem = watch.problem()
    if problem:
        return Row(what, problem, FAILED)
    if not scale.is_gpu:
        return Row(what, f"{watch.counted} steps counted; a CPU has nothing to wait for", UNCHECKED)
    found = f"none that torch knows of in {LAST - FIRST} steps, none of any kind in one; all batches from pinned memory"
    return Row(what, found, OK, "none")


def _on_cpu(scale: Scale) -> Row:
    command = [sys.executable, "-c", _ON_CPU, str(scale.folder / "on-cpu")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout.strip().splitlines()[-1:] or [done.stderr.strip()[-300:]]
    if not scale.is_gpu and said == ["left alone"]:
        return Row(_ON_CPU_WHAT, "there is none here", UNCHECKED)
    return Row(_ON_CPU_WHAT, said[0], OK if said == ["left alone"] else FAILED)

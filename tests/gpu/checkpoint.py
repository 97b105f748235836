"""Checkpoints while training goes on: what they hold up, and that they change no bit."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import psutil
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.gpu.harness import (
    BELOW,
    FAILED,
    FIGURE,
    OK,
    UNCHECKED,
    Case,
    Row,
    Scale,
    Stretch,
    mebibytes,
    passing,
    train_here,
)
from train.bench import checkpoint
from train.checkpoint import manifest
from train.checkpoint.buffers import ENVIRONMENT, Buffers, SnapshotMemory
from train.checkpoint.snapshot import Snapshots
from train.checkpoint.state import size_of, state_of
from train.run.run_folder import Run
from train.signals import USER, StopRequest

GOAL = 0.1
"""Of the seconds that torch.save takes, those that a checkpoint may take from training."""
_LONGEST = 20.0
"""Seconds of training in which two checkpoints are to find room; where they do not, there is one."""
_ALONE = "a checkpoint while nothing trains"
_SNAPSHOT = "a snapshot in memory, of a launched run"
_PATIENCE = 30.0
"""Seconds in which there is to be one."""
_TRY = 40
"""Steps of the first run, which tells how long a step and a write take."""


@dataclasses.dataclass
class _Timed:
    """A run, as it was timed."""

    seconds: float
    """Per step."""
    begun: int
    """The step after which time was taken, and"""
    steps: int
    """how many."""
    write: float
    """Seconds of its last checkpoint, which it waits for; of all, where there are several."""
    digest: str
    saved: int
    """Checkpoints that were kept."""
    broken: int
    """Those of them that are damaged."""


def part(scale: Scale) -> Iterator[Case]:
    """Under load, and alone."""
    yield Case("checkpoints while training goes on", 33, _under_load, (scale,))
    yield Case(_ALONE, 9, _alone, (scale,))
    yield Case(_SNAPSHOT, 8, _snapshot, (scale,))


def _under_load(scale: Scale) -> Iterator[Row]:
    """The GPT with AdamW, without and with checkpoints that are written one after the other."""
    flags = scale.flags("gpt") | {"precision": "bf16"}
    first = _timed(scale, flags | {"steps": _TRY}, settle=0.5)
    every, saves = _rhythm(scale, first)
    # after the last of them as many steps again: what its write takes belongs to it
    steps = every * (saves + 1) - 1
    plain = _timed(scale, flags | {"steps": steps})
    saving = _timed(scale, flags | {"steps": steps, "checkpoint.every_steps": every, "checkpoint.keep": 9})
    what, equal = "a checkpoint under load changes no bit", "equal digests"
    if plain.digest != saving.digest:
        yield Row(what, f"{plain.digest[:12]} and {saving.digest[:12]}", FAILED, equal)
    else:
        yield Row(what, "equal", OK, equal)
    found = f"{saving.saved} written, {saving.broken} damaged"
    is_right = saving.saved == saves + 1 and not saving.broken
    yield Row("checkpoints that were written meanwhile", found, OK if is_right else FAILED, "all whole")
    yield _stall(scale, flags, plain, saving, every, saves, first.write)
    memory = psutil.Process().memory_info().rss
    yield Row("host memory of the process after it", mebibytes(memory), figures={"rss": memory})


def _rhythm(scale: Scale, first: _Timed) -> tuple[int, int]:
    """Steps from one checkpoint to the next, and how many: a save waits for the write before it, which is no copy."""
    least = 3.0 / first.seconds if scale.is_gpu else 0  # before the first of them the stretch is to have begun
    every = math.ceil(max(1.5 * first.write / first.seconds, least, 12))
    if every * first.seconds < _LONGEST / 2:
        return every, 2
    return math.ceil(max(least, 12)), 1


def _stall(
    scale: Scale, flags: dict[str, Any], plain: _Timed, saving: _Timed, every: int, saves: int, write: float
) -> Row:
    """What a checkpoint takes from training, beside torch.save."""
    what = "what a checkpoint takes from training"
    saves -= saving.begun // every
    if not saves:
        return Row(what, f"all were over in step {saving.begun}, from which time was taken", UNCHECKED, "", {})
    stall = max((saving.seconds - plain.seconds) * saving.steps / saves, 0.0)
    size, plainly = _torch_save(scale, flags)
    figures = {
        "stall_s": stall, "torch_save_s": plainly, "state_bytes": size, "every_steps": every, "saves": saves,
        "write_s": write, "seconds": saving.seconds, "plain_seconds": plain.seconds,
    }  # fmt: skip
    found = f"{1000 * stall:.0f} ms, {stall / plainly:.2f} of torch.save ({1000 * plainly:.0f} ms), of a state of "
    found += f"{mebibytes(size)}; {saves} at {every} steps' distance"
    goal = f"at most {GOAL} of torch.save"
    if not scale.is_gpu:  # the cores that write are those that train
        return Row(what, found, FIGURE, goal, figures)
    return Row(what, found, OK if stall <= GOAL * plainly else BELOW, goal, figures)


def _alone(scale: Scale) -> Row:
    """`train bench checkpoint --device cuda`: a copy while nothing trains."""
    if not shutil.which("dd"):
        return Row(_ALONE, "train bench checkpoint asks dd what the disk can do, and here is none", UNCHECKED)
    table = checkpoint.bench(scale.folder, [3 if scale.is_small else 500], times=3, device=scale.device)
    cells = [cell.strip() for cell in table.splitlines()[-1].strip("|").split("|")]
    size, _, stall, ratio, durable, *_ = cells
    found = f"{size}: stalls for {1000 * float(stall):.0f} ms, {ratio} of torch.save; durable after {durable} s"
    return Row(_ALONE, found, figures={"table": table})


def _snapshot(scale: Scale) -> Row:
    """Of the GPT, in memory that is lent to it as a launched run's agent does: until there are two, or too long."""
    asked, copied, steps = list[float](), list[float](), set[int]()
    stop, memory, copy = StopRequest(()), SnapshotMemory(), Snapshots._copy

    def timed(snapshots: Snapshots, step: int) -> None:
        if asked:
            copied.append(snapshots.cost)  # of the one before
        began = time.perf_counter()
        copy(snapshots, step)
        asked.append(time.perf_counter() - began)

    def stepped(*_: object) -> None:
        steps.add(memory.step)
        if len(steps) > 2:  # 0 is one of them
            stop.ask(USER, "enough was seen")
        elif time.monotonic() - begun > _PATIENCE:
            stop.ask(USER, "there are no more")

    flags = scale.flags("gpt") | {"precision": "bf16", "steps": 1_000_000}
    lent = mock.patch.dict(os.environ, {ENVIRONMENT: memory.address})
    handle, begun = register_optimizer_step_post_hook(stepped), time.monotonic()
    try:
        with mock.patch.object(Snapshots, "_copy", timed), passing(scale, "gpt", flags) as run, lent:
            train_here(run, stop)
        step, size = memory.step, Buffers(memory.address).taken // 2
    finally:
        handle.remove()
        memory.close()
    figures = {"asked_s": asked, "cost_s": copied, "bytes": size, "step": step}
    if not step:
        found = f"none in {_PATIENCE:.0f} s: the host may have too little memory for two states of {mebibytes(size)}"
        return Row(_SNAPSHOT, found, UNCHECKED, figures=figures)
    found = f"{mebibytes(size)}, as often as one takes a hundredth of the time; the host for {1000 * asked[-1]:.0f} ms"
    if copied:
        found += f", with the device for {1000 * copied[-1]:.0f} ms"
    return Row(_SNAPSHOT, found, figures=figures)


def _timed(scale: Scale, flags: dict[str, Any], settle: float = 2.0) -> _Timed:
    with passing(scale, "gpt", flags) as run:
        with Stretch(scale, last=flags["steps"] - 1, settle=settle) as stretch:
            train_here(run)
        if not stretch.is_over:
            raise RuntimeError(f"its {stretch.counted} steps were over before time was taken")
        record, kept = run.read(), run.steps_saved()
        broken = sum(not _is_whole(run, step) for step in kept)
        write = record["attempts"][-1]["times"]["checkpoints"]
        return _Timed(stretch.seconds, stretch.begun, stretch.steps, write, record["weights_sha256"], len(kept), broken)


def _is_whole(run: Run, step: int) -> bool:
    try:
        manifest.verify(run.checkpoint(step))
    except ValueError:
        return False
    return True


def _torch_save(scale: Scale, flags: dict[str, Any]) -> tuple[int, float]:
    """Bytes of a state like that of the run, and the seconds that torch.save takes until it is on the disk."""
    from tests.gpu.models import GPT, GPT_VOCABULARY

    task = {"vocabulary": GPT_VOCABULARY, "context": 1024, "layers": 12, "width": 768, "heads": 12, "dropout": 0.0}
    task |= {name: flags[f"task.{name}"] for name in task if f"task.{name}" in flags}
    model: nn.Module = GPT(**task).to(scale.device)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # which makes its state
    optimizer.zero_grad()
    state = state_of(model, optimizer)
    file, began = scale.folder / "plain.pt", time.perf_counter()
    torch.save(state, file)
    with file.open("rb") as written:
        os.fsync(written.fileno())
    seconds = time.perf_counter() - began
    file.unlink()
    return size_of(state), seconds

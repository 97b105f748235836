"""A full device is told, a size that fits is found, an index out of range is named, and fsdp keeps no weights."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from tests.gpu.harness import (
    FAILED,
    OK,
    ROOT,
    TASKS,
    UNCHECKED,
    Case,
    Row,
    Scale,
    Stretch,
    alone,
    mebibytes,
    new_run,
    reason,
    train_forked,
    train_here,
)
from train.causes import GPU_MEMORY, MEMORY
from train.run import states
from train.run.run_folder import Run
from train.supervise.decide import LaunchMode
from train.tasks import text

_KEPT, _FOUND, _FULL = "weights that fsdp of one rank keeps", "a micro batch that fits", "a device that is full"
_ASSERT = "an index out of range"
_FITS = 4
"""Samples that fit, of a batch of twice as many."""
_FORWARDS = 7
"""The forward that fills the device: later than those that look for a size, two steps of two micro batches."""


def part(scale: Scale) -> Iterator[Case]:
    """fsdp in fp32 and bf16; auto batch size, then a full device; a device-side assert."""
    for precision in ("bf16", "fp32"):
        yield Case(f"{_KEPT}, {precision}", _kept, (scale, precision))
    yield Case(_FULL, _full, (scale,))
    yield Case(_ASSERT, _asserts, (scale,))


def _kept(scale: Scale, precision: str) -> Row:
    """What the GPT keeps of the device between forward and backward, on so few tokens that activations are small.

    Weights that were gathered, or cast to 16 bits, would be the most of it.
    """
    what, grown, sizes = f"{_KEPT}, {precision}", list[int](), set[int]()
    loss = text.loss

    def watched(model: Any, batch: Any) -> Any:
        before = _allocated(scale)
        value = loss(model, batch)
        grown.append(_allocated(scale) - before)
        sizes.add(sum(parameter.numel() for parameter in model.parameters()))
        return value

    flags = scale.flags("gpt") | {"precision": precision, "parallel.strategy": "fsdp", "parallel.wrap": "Block"}
    flags |= {"steps": 8, "batch_size": 4, "task.context": 32}
    gc.collect()
    # the task takes it when it is loaded
    with (
        mock.patch.object(text, "loss", watched), new_run(scale, "gpt", flags) as run, alone(scale, "fsdp"),
        Stretch(scale, 2, 7) as stretch,
    ):  # fmt: skip
        train_here(run)
    if not scale.is_gpu:
        return Row(what, f"{len(grown)} forwards; of a CPU's memory nothing is asked here", UNCHECKED)
    whole = max(sizes) * (2 if precision == "bf16" else 4)
    found = f"{mebibytes(grown[-1])} after a forward, with activations; at most {mebibytes(stretch.memory)} in a step"
    figures = {"kept": grown[-1], "weights": whole, "memory": stretch.memory}
    return Row(what, found, OK if grown[-1] < whole / 2 else FAILED, f"below half of {mebibytes(whole)}", figures)


def _allocated(scale: Scale) -> int:
    return torch.cuda.memory_allocated() if scale.is_gpu else 0


def _full(scale: Scale) -> Iterator[Row]:
    """`train run`, as a user has it: it looks for a size that fits, and trains with it until the device is full."""
    flags = scale.flags("hungry") | {"batch_size": 2 * _FITS, "micro_batch_size": "auto", "task.full": _FORWARDS}
    if scale.is_gpu:
        gc.collect()
        torch.cuda.empty_cache()
        # of what is free, 0.6 are taken by the size that fits and 1.2 by the whole batch
        flags["task.sample"] = int(0.6 * torch.cuda.mem_get_info()[0] / _FITS)
    else:
        flags["task.most"] = _FITS
    run = Run(scale.folder / "hungry")
    given = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    command = ["-m", "train", "run", str(TASKS / "hungry.py"), "--runs", str(scale.folder), "--name", "hungry", *given]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    if not run.folder.exists():
        yield Row(_FOUND, f"exit code {done.returncode}: {done.stderr.strip()[-300:]}", FAILED)
        return
    record, size = run.read(), run.read_config()["micro_batch_size"]
    found = f"{size} of a batch of {2 * _FITS}: {str(record.get('micro_batch_size_reason'))[:160]}"
    yield Row(_FOUND, found, OK if size == _FITS else FAILED, str(_FITS))
    said = str(record["reason"])
    is_told = said.startswith("out of memory (") and (GPU_MEMORY if scale.is_gpu else MEMORY).remedy in said
    is_right = is_told and said in done.stderr and done.returncode == 3 and record["state"] == states.FAILED
    found = f"exit code {done.returncode}, {record['state']}: {said}"
    yield Row(_FULL, found, OK if is_right else FAILED, "exit code 3, the cause and a remedy")


def _asserts(scale: Scale) -> Row:
    """A launched run whose step reads beyond the end of a table: it would do so again, and must not be restarted."""
    flags = scale.flags("hungry") | {"steps": 20, "task.wrong": 5}
    with new_run(scale, "hungry", flags) as run:
        record = train_forked(run, mode=LaunchMode.LAUNCHED)
    said, attempts = reason(record), len(record["attempts"])
    found = f"{record['state']} in attempt {attempts}: {said}"
    if record["state"] != states.FAILED or attempts > 1:
        return Row(_ASSERT, found, FAILED, "failed in attempt 1")
    if not scale.is_gpu:
        return Row(_ASSERT, f"a CPU raises where it is: {said}", UNCHECKED)
    return Row(_ASSERT, found, OK if "device-side assert" in said else FAILED, "failed in attempt 1, as it is")

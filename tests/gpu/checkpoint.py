"""A checkpoint during training changes no bit, is whole, and delays training little."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import torch

from tests.gpu.harness import (
    BELOW,
    FAILED,
    FIGURE,
    OK,
    Case,
    Row,
    Scale,
    Stretch,
    mebibytes,
    new_run,
    train_here,
)
from train.checkpoint import manifest

GOAL = 0.1
"""Of the seconds that torch.save takes, those that a checkpoint may take from training."""


def part(scale: Scale) -> Iterator[Case]:
    """The GPT with AdamW, without a checkpoint and with one."""
    yield Case("a checkpoint under load", _under_load, (scale,))


def _under_load(scale: Scale) -> Iterator[Row]:
    first, saved = (20, 60) if scale.is_gpu else (8, 12)
    last = 2 * saved - 2  # as many steps again after it: what its write takes belongs to it
    flags = scale.flags("gpt") | {"precision": "bf16", "steps": last + 1, "checkpoint.keep": 9}
    without, plain, _ = _timed(scale, flags, first, last)
    within, saving, size = _timed(scale, flags | {"checkpoint.every_steps": saved}, first, last)
    what, is_equal = "a checkpoint under load changes no bit", without == within
    found = "equal" if is_equal else f"{without[:12]} and {within[:12]}"
    yield Row(what, found, OK if is_equal else FAILED, "equal digests")
    stall, plainly = max((saving - plain) * (last - first), 0.0), _torch_save(scale, size)
    found = (
        f"{1000 * stall:.0f} ms, {stall / plainly:.2f} of torch.save ({1000 * plainly:.0f} ms), of {mebibytes(size)}"
    )
    verdict = OK if stall <= GOAL * plainly else BELOW
    figures = {"stall_s": stall, "torch_save_s": plainly, "bytes": size, "seconds": saving, "plain_seconds": plain}
    yield Row(
        "what a checkpoint takes from training", found,
        verdict if scale.is_gpu else FIGURE,  # the cores that write are those that train
        f"at most {GOAL} of torch.save", figures,
    )  # fmt: skip


def _timed(scale: Scale, flags: dict[str, Any], first: int, last: int) -> tuple[str, float, int]:
    """The digest of a run, the seconds of a step, and the bytes of its last checkpoint.

    Raises:
        ValueError: a checkpoint is damaged.
    """
    with new_run(scale, "gpt", flags) as run:
        with Stretch(scale, first, last) as stretch:
            train_here(run)
        saved = run.steps_saved()
        assert len(saved) == (2 if "checkpoint.every_steps" in flags else 1), saved
        for step in saved:
            manifest.verify(run.checkpoint(step))
        size = sum(file.stat().st_size for file in run.checkpoint(saved[-1]).rglob("*") if file.is_file())
        return str(run.read()["weights_sha256"]), stretch.seconds, size


def _torch_save(scale: Scale, size: int) -> float:
    """The seconds that torch.save takes with so many bytes of the device, until they are on the disk."""
    state = torch.ones(size, dtype=torch.uint8, device=scale.device)
    file, began = scale.folder / "plain.pt", time.perf_counter()
    torch.save(state, file)
    with file.open("rb") as written:
        os.fsync(written.fileno())
    seconds = time.perf_counter() - began
    file.unlink()
    return seconds

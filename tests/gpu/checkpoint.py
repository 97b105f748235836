"""Checkpoints while training goes on: what they hold up, and that they change no bit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import psutil
import torch
from torch import nn

from tests.gpu.harness import FAILED, OK, Row, Scale, Stretch, made, mebibytes, train_here
from train.checkpoint.state import size_of, state_of
from train.record import manifest

EVERY = 12
STEPS = 40
FIRST = 5
"""Before this step things are got ready: kernels are chosen, memory for copies is reserved."""


def part(scale: Scale) -> Iterator[Row]:
    """The GPT with AdamW, without and with a checkpoint every few steps."""
    flags = scale.flags("gpt") | {"precision": "bf16", "steps": STEPS}
    plain, _, digest = _timed(scale, flags)
    saving, record, digest_saving = _timed(scale, flags | {"checkpoint.every_steps": EVERY, "checkpoint.keep": 9})
    what = "a checkpoint under load changes no bit"
    if digest != digest_saving:
        yield Row(what, f"{digest[:12]} and {digest_saving[:12]}", FAILED, "equal digests")
    else:
        yield Row(what, "equal", OK, "equal digests")
    saves = STEPS // EVERY
    stall = max((saving - plain) * (STEPS - FIRST) / saves, 0.0)
    size, plainly = _torch_save(scale, flags)
    figures = {"stall_s": stall, "torch_save_s": plainly, "state_bytes": size}
    found = f"{1000 * stall:.0f} ms, torch.save {1000 * plainly:.0f} ms, of a state of {mebibytes(size)}"
    yield Row("what a checkpoint takes from training", found, goal="below a tenth of torch.save", figures=figures)
    broken = [step for step in record.steps_saved() if not _is_whole(record, step)]
    found = f"{len(record.steps_saved())} written, {len(broken)} damaged"
    yield Row("checkpoints that were written meanwhile", found, FAILED if broken else OK, "all whole")
    memory = psutil.Process().memory_info().rss
    yield Row("host memory of the process after it", mebibytes(memory), figures={"rss": memory})


def _is_whole(run: Any, step: int) -> bool:
    try:
        manifest.verify(run.checkpoint(step))
    except ValueError:
        return False
    return True


def _timed(scale: Scale, flags: dict[str, Any]) -> tuple[float, Any, str]:
    """Seconds a step, the run, its digest."""
    run = made(scale, "gpt", flags)
    with Stretch(FIRST, STEPS, scale.device) as stretch:
        train_here(run)
    return stretch.seconds, run, run.read()["weights_sha256"]


def _torch_save(scale: Scale, flags: dict[str, Any]) -> tuple[int, float]:
    """Bytes of a state like that of the run, and the seconds that torch.save takes to write it."""
    from tests.gpu.models import GPT, GPT_VOCABULARY

    task = {"vocabulary": GPT_VOCABULARY, "context": 1024, "layers": 12, "width": 768, "heads": 12, "dropout": 0.0}
    task |= {name: flags[f"task.{name}"] for name in task if f"task.{name}" in flags}
    model: nn.Module = GPT(**task).to(scale.device)  # type: ignore[arg-type]
    state = state_of(model, torch.optim.AdamW(model.parameters()))
    began = time.perf_counter()
    torch.save(state, scale.folder / "plain.pt")
    return size_of(state), time.perf_counter() - began

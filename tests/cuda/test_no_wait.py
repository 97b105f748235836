"""No step waits for the GPU, whatever a run does in it: every wait is seen, also those that torch does not report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cuda import standin
from tests.cuda.tasks import trained, word
from tests.tasks import TASKS
from train.data.plan import Plan, Sharing, micro_batches_of

pytestmark = [pytest.mark.minutes, pytest.mark.skipif(bool(standin.lacks()), reason=standin.lacks())]
TASK = TASKS / "on_device.py"
FLAGS: dict[str, Any] = {
    "steps": 5, "batch_size": 8, "micro_batch_size": 4, "cpu_threads": 1, "eval.every_epochs": 0, "precision": "fp32",
    "schedule.warmup_epochs": 0.5,
}  # fmt: skip
_MICROS = {
    (m.step, m.number): m.indices.tolist()
    for m in micro_batches_of(Plan(length=20, batch_size=8, micro_batch_size=4), Sharing(), first=3, last=5)
}
BAD = [_MICROS[3, 0][0], *_MICROS[3, 1], *_MICROS[4, 0], *_MICROS[4, 1]]
"""Of the fourth step a sample and the second micro batch, and all of the fifth."""
SKIP = {"data.on_error": "skip", "task.bad": " ".join(map(str, BAD))}
# not with ordered sums: they add the number of samples on the device, where it stays 0, which ends the run
CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "tf32 decays in steps": {"precision": "tf32", "schedule.decay": "step", "optim.name": "adamw"},
    "bf16 clipped": {"precision": "bf16", "clip_grad_norm": 1.0},
    "averaged": {"ema.decay": 0.9, "ema.warmup": 10},
    "fp16": {"precision": "fp16", "optim.name": "adam"},
    "fp16 clipped": {"precision": "fp16", "clip_grad_norm": 1.0, "task.counted": "true"},
    "fp64 counted": {"precision": "fp64", "task.counted": "true"},
    "gradients logged": {"log.gradients": "true", "log.every_steps": 1},
    "channels last": {"channels_last": "true", "micro_batch_size": 8},
    "ordered": {"parallel.reduce": "ordered", "micro_batch_size": 2},
    "data on the device": {"data.on_device": "true"},
    "bad samples": SKIP,
    "bad samples in fp16": SKIP | {"precision": "fp16", "optim.name": "adamw"},
}
FAULTS = ["item", "bool", "tensor", "copy", "pinned", "back", "index"]
OWN = """

def optimizer(model, config):
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": RATE}]
    return torch.optim.NAME(groups, lr=0.1, MORE)
"""
"""An optimizer of the task's own; a rate may be a tensor."""
RMSPROP = ("RMSprop", "0.2", "momentum=0.9")
ADAMW = ("AdamW", "torch.full((), 0.2, device=parameters[0].device)", "fused=True")


def with_optimizer(folder: Path, name: str, rate: str, more: str) -> Path:
    """The task, with this optimizer of its own."""
    task = folder / f"{name}.py"
    task.write_text(TASK.read_text() + OWN.replace("NAME", name).replace("RATE", rate).replace("MORE", more))
    return task


def test_no_step_waits_and_what_waits_is_seen(tmp_path: Path) -> None:
    free: dict[str, str] = {case: word(TASK, FLAGS | flags) for case, flags in CASES.items()}
    rmsprop, adamw = with_optimizer(tmp_path, *RMSPROP), with_optimizer(tmp_path, *ADAMW)
    free |= {"own RMSprop": word(rmsprop, FLAGS), "own AdamW": word(adamw, FLAGS)}
    waits = {fault: word(TASK, FLAGS | {"task.fault": fault}) for fault in FAULTS}
    # as docs/gpu.md says: GradScaler looks whether a gradient is infinite
    waits["fp16, not fused"] = word(rmsprop, FLAGS | {"precision": "fp16"})
    found = trained(tmp_path, *free.values(), *waits.values(), watch=True)
    assert {case: end for case, end in zip(free, found, strict=False) if end != ("finished", [])} == {}
    for fault, (end, calls) in zip(waits, found[len(free) :], strict=True):
        assert end != "finished" or calls, f"{fault} was not seen"

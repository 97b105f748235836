"""No step waits for a GPU, and none mixes devices: seen without one, see tests/train/absent.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tasks import TASKS
from tests.train.absent import GPU, Watch, training
from train.checkpoint.serialize import serialize
from train.checkpoint.staging import own_part
from train.data.plan import Plan, Sharing, micro_batches_of
from train.parallel.rank_env import RankEnv

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a GPU here: make test-gpu looks at its steps"),
    pytest.mark.filterwarnings(
        "ignore:User provided device_type", "ignore:CUDA is not available", "ignore:Accessing the data pointer"
    ),
]
TASK = TASKS / "on_device.py"
FLAGS: dict[str, Any] = {
    "steps": 5, "batch_size": 8, "micro_batch_size": 4, "cpu_threads": 1, "data.workers": 0, "log.tensorboard": "false",
    "checkpoint.every_minutes": 0, "checkpoint.asynchronous": "false", "eval.every_epochs": 0,
    "schedule.warmup_epochs": 0.5,
}  # fmt: skip
WARM = 2
"""Steps in which the engine waits on purpose: to see whether a forward changes the model."""
_MICROS = {(m.step, m.number): m.indices.tolist() for m in micro_batches_of(Plan(20, 8, 4), Sharing(), 3, 5)}
BAD = [_MICROS[3, 0][0], *_MICROS[3, 1], *_MICROS[4, 0], *_MICROS[4, 1]]
"""Of the fourth step a sample and the second micro batch, and all of the fifth."""
SKIP = {"data.on_error": "skip", "task.bad": " ".join(map(str, BAD))}
CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "tf32 decays in steps": {"precision": "tf32", "schedule.decay": "step", "optim.name": "adamw"},
    "bf16 clipped": {"precision": "bf16", "clip_grad_norm": 1.0, "task.half": "bfloat16"},
    "averaged": {"ema.decay": 0.9, "ema.warmup": 10},
    "fp16": {"precision": "fp16", "optim.name": "adam", "task.half": "float16"},
    "fp16 clipped": {"precision": "fp16", "clip_grad_norm": 1.0, "task.counted": "true"},
    "fp64 counted": {"precision": "fp64", "task.counted": "true"},
    "gradients logged": {"log.gradients": "true", "log.every_steps": 1},
    "channels last": {"channels_last": "true", "micro_batch_size": 8},
    "ordered": {"parallel.reduce": "ordered", "micro_batch_size": 2},
    "bad samples": SKIP,
    "bad samples in fp16": SKIP | {"precision": "fp16", "optim.name": "adamw"},
    "bad samples in order": SKIP | {"parallel.reduce": "ordered"},
}
OWN = """

def optimizer(model, config):
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": RATE}]
    return torch.optim.NAME(groups, lr=0.1, MORE)
"""
"""An optimizer of the task's own; a rate may be a tensor."""
OPTIMIZERS = {
    "RMSprop": ("0.2", "momentum=0.9"),
    "AdamW": ("torch.full((), 0.2, device=parameters[0].device)", "fused=True"),
}


def with_optimizer(folder: Path, name: str) -> Path:
    """The task, with this optimizer of its own."""
    task, (rate, more) = folder / "own.py", OPTIMIZERS[name]
    task.write_text(TASK.read_text() + OWN.replace("NAME", name).replace("RATE", rate).replace("MORE", more))
    return task


def functions(waits: list[str]) -> set[str]:
    """Which functions have waited."""
    return {wait.split()[0] for wait in waits}


def no_wait(loop: Any, watch: Watch) -> int:
    """Make the first steps, then three in which nothing may wait. Returns how many tensors those brought to the GPU."""
    watch.waits.clear()
    for _ in range(WARM):
        loop.step()
    of_model_check = functions(watch.waits)  # in an attempt's first two steps alone
    assert "end" in of_model_check and of_model_check <= {"end", "_values"}
    watch.waits.clear()
    watch.brought = 0
    for _ in range(3):  # the first of them has one micro batch where an epoch ends
        watch.kernels = 0
        loop.step()
        assert watch.waits == []
        assert watch.kernels > 5 and loop.readback.last.device == GPU
    return watch.brought


BROUGHT = {"channels last": 2 * 3, "ordered": 2 * (2 + 4 + 4)}
"""Pictures and labels of how many micro batches."""


@pytest.mark.parametrize("case", CASES)
def test_no_step_waits(tmp_path: Path, case: str) -> None:
    with training(tmp_path, TASK, FLAGS | CASES[case]) as (loop, watch):
        brought = no_wait(loop, watch)
    assert brought == BROUGHT.get(case, 2 * (1 + 1) if "bad" in case else 2 * (1 + 2 + 2))


SMALL: dict[str, dict[str, Any]] = {
    "digits": {"channels_last": "true"},
    "fake": {"task.count": 40, "task.size": 16},
    "text": {"task.context": 16, "task.width": 16, "task.layers": 1, "task.heads": 2},
}


@pytest.mark.parametrize("task", SMALL)
def test_neither_steps_nor_evaluations_of_a_built_in_task_wait(tmp_path: Path, task: str) -> None:
    flags = FLAGS | SMALL[task] | {"eval.limit_batches": 1}
    if task == "text":
        (tmp_path / "some.txt").write_text("To be, or not to be. " * 100)
        flags["data.root"] = tmp_path
    with training(tmp_path, task, flags) as (
        loop,
        watch,
    ):
        no_wait(loop, watch)
        loop.evaluate()
        assert functions(watch.waits) == {"_on_host", "summed"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_step_waits_with_an_optimizer_of_the_task_s_own(tmp_path: Path, name: str) -> None:
    with training(tmp_path, with_optimizer(tmp_path, name), FLAGS) as (loop, watch):
        no_wait(loop, watch)


def test_fp16_waits_where_an_optimizer_is_not_fused(tmp_path: Path) -> None:
    """As docs/gpu.md says: GradScaler looks whether a gradient is infinite."""
    with training(tmp_path, with_optimizer(tmp_path, "RMSprop"), FLAGS | {"precision": "fp16"}) as (loop, watch):
        for _ in range(WARM):
            loop.step()
        watch.waits.clear()
        loop.step()
        assert functions(watch.waits) == {"update"}


def test_no_step_waits_where_ranks_exchange_sums(tmp_path: Path) -> None:
    """In each of the watched steps the last rank computes a micro batch again."""
    flags = {"parallel.reduce": "ordered", "micro_batch_size": 2, "clip_grad_norm": 1.0, "task.counted": "true"}
    with training(tmp_path, TASK, FLAGS | flags, RankEnv(2, 3, 2, 3)) as (loop, watch):
        assert no_wait(loop, watch) == 2 * (1 + 2 + 2)


@pytest.mark.parametrize("flags", [{}, {"task.counted": "true", "precision": "fp16"}])
def test_an_evaluation_waits_at_its_end(tmp_path: Path, flags: dict[str, Any]) -> None:
    with training(tmp_path, TASK, FLAGS | flags | {"steps": 1}) as (loop, watch):
        loop.step()
        watch.waits.clear()
        loop.evaluate()
        assert functions(watch.waits) == {"_on_host", "summed"}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_state_is_named_and_serialized_without_a_wait(tmp_path: Path, precision: str) -> None:
    with training(tmp_path, TASK, FLAGS | {"precision": precision, "channels_last": "true"}) as (loop, watch):
        loop.step()
        watch.waits.clear()
        job = loop.job
        assert own_part(job.state.tree(), 0, 2)
        serialized = serialize(job.state, "same", 1, "mark")
        serialized.copy_to(watch.pinned(torch.empty(serialized.size, dtype=torch.uint8)))
        assert watch.waits == []
        assert job.strategy.not_finite() == "" and functions(watch.waits) == {"not_finite"}


FAULTS = ["item", "bool", "tensor", "copy", "pinned", "back", "index"]


@pytest.mark.parametrize("fault", FAULTS)
def test_what_waits_is_seen(tmp_path: Path, fault: str) -> None:
    with training(tmp_path, TASK, FLAGS | {"task.fault": fault}) as (loop, watch):
        loop.step()
        assert any("task.py" in wait for wait in watch.waits)

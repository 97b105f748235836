"""Evaluation: every sample exactly once on any number of ranks, and the same figures to the last bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from train.data.plan import MicroBatch, Plan
from train.data.seeds import seed_compute
from train.engine import uneven
from train.engine.quiet import quiet
from train.errors import TrainingFailed
from train.parallel.precision import Precision
from train.parallel.world import World
from train.tasks import Task

_ASK_EVERY = 16
"""Micro batches between two looks, by all ranks, at whether a stop was asked for."""


def total_and_count(value: Any, samples: int, what: str) -> tuple[Tensor, Any]:
    """A mean over the batch or a pair (total, count), as total and count.

    Raises:
        TrainingFailed: it is neither.
    """
    if isinstance(value, tuple) and len(value) == 2:
        return value[0], value[1]
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.reshape(()).double() * samples, samples
    shape = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{type(value).__name__}"
    raise TrainingFailed(f"{what} must return a scalar tensor, the mean over the batch, or (total, count); got {shape}")


def evaluate(
    task: Task,
    module: nn.Module,
    plan: Plan,
    world: World,
    precision: Precision,
    stream: Iterator[tuple[MicroBatch, Any]],
    stop: Callable[[], bool] = lambda: False,
    beat: Callable[[], None] = lambda: None,
) -> tuple[dict[str, float], int] | None:
    """Loss and metrics over the data set, weighted by true counts, and the number of samples that were read.

    None if a stop came in between.

    A collective: all ranks call it. Sums are made in the order of the data set, whatever the number of ranks.

    Args:
        plan: of the evaluation set.
        stream: begins with the batches of this rank's `evaluation_micro_batches`; no more than them is taken.
    """
    was_training = module.training
    module.eval()
    rows: list[list[Tensor | float]] = []
    """Of each micro batch: the number of its samples, then total and count of the loss and of each metric."""
    names: list[str] = []
    micros = math.ceil(plan.evaluated / plan.micro_batch_size)
    slots = math.ceil(micros / world.size)
    without = uneven.idle(micros, world.size)
    try:
        with torch.no_grad():
            for slot in range(slots):
                if slot % _ASK_EVERY == 0 and world.any(stop()):
                    return None
                if slot * world.size + world.rank >= micros:
                    continue
                beat()
                micro, batch = next(stream)
                assert micro.of_evaluation
                samples = len(micro.indices)
                if not samples:  # none of them could be read
                    rows.append([])
                    continue
                seed_compute(micro.seed, world.device)
                is_risky = without and slot in (0, slots - 1)
                waits_for = f"{uneven.names(without)}, without data in an evaluation" if is_risky else ""
                with precision.autocast(), quiet("loss or metrics", task.file, waits_for):
                    row = [samples, *total_and_count(task.loss(module, batch), samples, "loss")]
                    found = task.metrics(module, batch) if task.metrics else {}
                if not isinstance(found, dict):
                    raise TrainingFailed(
                        f"metrics must return a dict from names to tensors, got {type(found).__name__}"
                    )
                for name, value in found.items():
                    row.extend(total_and_count(torch.as_tensor(value, device=world.device), samples, f"metric {name}")
                               if not isinstance(value, tuple) else value)  # fmt: skip
                names = list(found)
                rows.append(row)
    finally:
        module.train(was_training)
    # rank 0 may have read nothing
    names = max(world.gather(names), key=bool)
    table = torch.zeros(micros, 3 + 2 * len(names), dtype=torch.float64, device=world.device)
    for index, row in enumerate(rows):
        if not row:
            continue
        if len(row) != table.shape[1]:
            raise TrainingFailed("metrics must return the same names for every batch")
        table[world.rank + index * world.size] = torch.stack(
            [torch.as_tensor(value, dtype=torch.float64, device=world.device) for value in row]
        )
    columns = world.add(table).cpu().T.tolist()  # each row is one rank's alone: adding zeros rounds nothing
    sums = [math.fsum(column) for column in columns]
    figures = {
        name: sums[2 * place + 1] / sums[2 * place + 2] if sums[2 * place + 2] else math.nan
        for place, name in enumerate(["loss", *names])
    }
    return figures, round(sums[0])

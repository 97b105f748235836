"""Evaluation: every sample exactly once on any number of ranks, and the same figures to the last bit."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from train.data.plan import MicroBatch, Plan, Sharing
from train.data.seeding import owned, seed_compute
from train.engine.loss import Figure, evaluation_figures
from train.errors import TrainingFailed
from train.parallel.precision import Precision
from train.parallel.torch_private import buffers_of
from train.parallel.world import World
from train.tasks import Task

_ASK_EVERY = 16
"""Micro batches between two looks, by all ranks, at whether a stop was asked for."""
_LARGE = 64 << 20
"""Bytes of a buffer that holds weights rather than what an evaluation counts."""
_OTHER_NAMES = "metrics must return the same names for every batch"


def evaluate(
    task: Task,
    module: nn.Module,
    plan: Plan,
    world: World,
    precision: Precision,
    stream: Iterator[tuple[MicroBatch, Any]],
    stop: Callable[[], bool] = lambda: False,
    beat: Callable[[], None] = lambda: None,
    sharing: Sharing | None = None,
    look: Callable[[Any], None] = lambda _: None,
) -> tuple[dict[str, float], int] | None:
    """Loss and metrics over the data set, weighted by true counts, and the number of samples that were read.

    None if a stop came in between.

    A collective: all ranks call it. Sums are made in the order of the data set, whatever the number of ranks.

    Args:
        plan: of the evaluation set.
        stream: begins with the batches of this rank's `evaluation_micro_batches`; no more than them is taken.
        sharing: whose micro batches are whose; None: as ranks without anything special share them.
        look: is shown the first batch of this rank.

    Raises:
        TrainingFailed: the task returns something else than figures, or not the same ones for every batch.
    """
    was_training = module.training
    module.eval()
    rows: dict[int, list[Tensor | float]] = {}
    """By micro batch: the number of its samples, then total and count of the loss and of each metric."""
    names: list[str] = []
    micros = math.ceil(plan.evaluated / plan.micro_batch_size)
    sharing = sharing or Sharing(world.rank, world.size)
    own = owned(module, task.loss, task.metrics)
    try:
        # what an evaluation counts or observes is no part of training: a resume does not repeat it
        with torch.no_grad(), _same_buffers(module):
            for slot in range(len(sharing.computed(micros))):
                if slot % _ASK_EVERY == 0 and world.any(stop()):
                    return None
                beat()
                micro, batch = next(stream)
                assert micro.of_evaluation
                if not len(micro.indices):  # none of its samples could be read
                    continue
                if not rows:
                    look(batch)
                seed_compute(micro.seed, world.device, own=own)
                with precision.autocast():
                    figures = evaluation_figures(task, module, batch, len(micro.indices))
                if not micro.is_repeated:
                    names = names or list(figures)
                    rows[micro.number] = _row(len(micro.indices), figures, names)
    finally:
        module.train(was_training)
    return _summed(rows, names, micros, world)


@contextlib.contextmanager
def _same_buffers(model: nn.Module) -> Iterator[None]:
    """Put back, at the end, each buffer where it was, and what was in it."""
    before = [
        (part, name, buffer, None if buffer is None or buffer.nbytes > _LARGE else buffer.detach().clone())
        for part in model.modules()
        for name, buffer in buffers_of(part).items()
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for part, name, buffer, content in before:
                buffers_of(part)[name] = buffer
                if buffer is not None and content is not None:
                    buffer.copy_(content)


def _row(samples: int, figures: dict[str, Figure], names: list[str]) -> list[Tensor | float]:
    if figures.keys() != set(names):
        raise TrainingFailed(_OTHER_NAMES)
    row: list[Tensor | float] = [samples]
    for name in names:
        row += [figures[name].total(torch.float64), figures[name].counted()]
    return row


def _on_host(rows: list[list[Tensor | float]]) -> list[list[float]]:
    """The rows in numbers, brought from each device together: of every single one the host would wait for it."""
    found: dict[tuple[torch.device, torch.dtype], list[tuple[list[float], int, Tensor]]] = {}
    made = []
    for row in rows:
        numbers = [math.nan if isinstance(value, Tensor) else float(value) for value in row]
        for place, value in enumerate(row):
            if isinstance(value, Tensor):
                found.setdefault((value.device, value.dtype), []).append((numbers, place, value))
        made.append(numbers)
    for there in found.values():
        brought = torch.stack([value for _, _, value in there]).tolist()
        for (numbers, place, _), value in zip(there, brought, strict=True):
            numbers[place] = float(value)
    return made


def _summed(
    rows: dict[int, list[Tensor | float]], names: list[str], micros: int, world: World
) -> tuple[dict[str, float], int]:
    """The figures of all ranks' rows, and the number of samples. A collective."""
    mine = {name: place for place, name in enumerate(names)}
    everybodys = [found for found in world.gather(names) if found]  # a rank may have read nothing
    if any(set(found) != set(everybodys[0]) for found in everybodys):
        raise TrainingFailed(_OTHER_NAMES)
    names = everybodys[0] if everybodys else []
    table = np.zeros((micros, 1 + 2 * len(names)))
    for number, row in zip(rows, _on_host(list(rows.values())), strict=True):
        table[number] = [row[0], *(row[1 + 2 * mine[name] + part] for name in names for part in (0, 1))]
    whole = world.add(torch.from_numpy(table).to(world.device))
    columns = whole.cpu().T.tolist()  # each row is one rank's alone: adding zeros rounds nothing
    sums = [math.fsum(column) for column in columns]
    figures = {
        name: sums[2 * place + 1] / sums[2 * place + 2] if sums[2 * place + 2] else math.nan
        for place, name in enumerate(names)
    }
    return figures or {"loss": math.nan}, round(sums[0])

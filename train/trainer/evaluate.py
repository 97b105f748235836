"""Evaluation: every sample exactly once on any number of ranks, and the same figures to the last bit."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from train.config import Config
from train.data.fetch import BadSample
from train.data.loader import Loader
from train.data.plan import MicroBatch, Plan, Sharing, evaluation_micro_batches
from train.data.seeding import owned, seed_compute
from train.errors import Refused, TrainingFailed
from train.parallel.devices import NoGPU, pick_device, take_device
from train.parallel.precision import Precision
from train.parallel.torch_private import buffers_of
from train.parallel.world import World
from train.run.run_folder import Run
from train.tasks import Task
from train.trainer import build, determinism
from train.trainer.load import load_trained, precision_on
from train.trainer.loss import Figure, evaluation_figures

log = logging.getLogger("train")

_ASK_EVERY = 16
"""Micro batches between two checks of all ranks for a stop request."""
_LARGE = 64 << 20
"""Bytes of a buffer that holds weights rather than statistics."""
Row = list[Tensor | float]
"""Of a micro batch: the number of its samples, then total and count of each figure, in the order of their names."""
_OTHER_NAMES = "metrics must return the same names for every batch"


def evaluate(
    task: Task,
    module: nn.Module,
    plan: Plan,
    world: World,
    precision: Precision,
    stream: Iterator[tuple[MicroBatch, Any]],
    sharing: Sharing,
    stop: Callable[[], bool] = lambda: False,
    beat: Callable[[], None] = lambda: None,
    show: Callable[[Any], None] = lambda _: None,
) -> tuple[dict[str, float], int] | None:
    """Loss and metrics over the data set, weighted by true counts, and the number of samples that were read.

    None if a stop came in between.

    A collective: all ranks call it. Sums are made in the order of the data set, whatever the number of ranks.

    Args:
        plan: of the evaluation set.
        stream: begins with the batches of this rank's `evaluation_micro_batches`; no more than them is taken.
        sharing: which micro batches are this rank's.
        show: called with the first batch of this rank.

    Raises:
        TrainingFailed: the task returns something else than figures, or not the same ones for every batch.
    """
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    rows: dict[int, Row] = {}
    names: list[str] = []
    micros = math.ceil(plan.evaluated / plan.micro_batch_size)
    generators = owned(module, task.loss, task.metrics)
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
                    show(batch)
                seed_compute(micro.seed, world.device, own=generators)
                with precision.autocast():
                    figures = evaluation_figures(task, module, batch, len(micro.indices))
                if not micro.is_repeated:
                    names = names or list(figures)
                    if figures.keys() != set(names):
                        raise TrainingFailed(_OTHER_NAMES)
                    rows[micro.number] = _row(len(micro.indices), figures)
    finally:
        for part, mode in modes:  # not train(): what is frozen stays in eval mode
            part.training = mode
    return summed(rows, names, micros, world)


@contextlib.contextmanager
def _same_buffers(model: nn.Module) -> Iterator[None]:
    """Restore each buffer at the end: the tensor and its content."""
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


def _row(samples: int, figures: dict[str, Figure]) -> Row:
    row: Row = [samples]
    for name in sorted(figures):
        row += [figures[name].total(torch.float64), figures[name].counted()]
    return row


def _on_host(rows: Iterable[Row], device: torch.device) -> list[list[float]]:
    """The rows as numbers. Tensors are transferred together: the host waits for the device in each transfer."""
    rows = list(rows)
    tensors = [value.to(device, torch.float64) for row in rows for value in row if isinstance(value, Tensor)]
    numbers = iter(torch.stack(tensors).tolist() if tensors else ())
    return [[next(numbers) if isinstance(value, Tensor) else float(value) for value in row] for row in rows]


def summed(rows: dict[int, Row], names: list[str], micros: int, world: World) -> tuple[dict[str, float], int]:
    """The figures of all ranks' rows, by these names, and the number of samples. A collective."""
    all_names = [found for found in world.gather(names) if found]  # a rank may have read nothing
    if any(set(found) != set(all_names[0]) for found in all_names):
        raise TrainingFailed(_OTHER_NAMES)
    names = all_names[0] if all_names else []
    table = np.zeros((micros, 1 + 2 * len(names)))
    if rows:
        table[list(rows)] = _on_host(rows.values(), world.device)
    whole = world.add(torch.from_numpy(table).to(world.device))  # each row is one rank's: adding zeros rounds nothing
    samples, *sums = [math.fsum(column) for column in whole.cpu().T.tolist()]
    means = {
        name: total / count if count else math.nan
        for name, total, count in zip(sorted(names), sums[::2], sums[1::2], strict=True)
    }
    return {name: means[name] for name in names} or {"loss": math.nan}, round(samples)


def _warn(bad: Sequence[BadSample]) -> None:
    for one in bad:
        log.warning("warning: left out: %s: %s", one, one.reason)


def evaluate_run(run: Run, step: int | None) -> tuple[int, int, dict[str, float]]:
    """Evaluate a checkpoint of a run in this process. Returns its step, the number of samples and the figures.

    Raises:
        Refused: the task has no evaluation set or fails on it, or there is no usable checkpoint.
    """
    task, config, model, step = load_trained(run, step)
    determinism.set_determinism(config)
    device = _device_of(run, config)
    name = precision_on(device, config)
    if name != config.precision:
        log.warning("warning: a CPU has no %s: evaluated in %s", config.precision, name)
    precision = Precision(name, device)
    train_set, eval_set = build.make_datasets(task, config)
    if eval_set is None:
        raise Refused(f"the task of {run.name} has no evaluation set: its datasets() returns None for it")
    differs = build.data_differs(run, task, config, train_set, eval_set)
    if differs:
        log.warning("warning: the data differ from those that %s was trained with: %s", run.name, differs)
    plan = build.evaluation_plan(config, len(eval_set))
    world = World(0, 1, 0, device)
    skipped = _warn if config.data.leaves_out else None
    loader = Loader(
        None, eval_set, task.collate, config.data.workers or 0, device, precision.inputs, skipped,
        config.channels_last, task.on_device, task.datasets,
    )  # fmt: skip
    with loader, build.refusing(task):
        take_device(device)
        sharing = Sharing()
        stream = loader.batches(evaluation_micro_batches(plan, sharing))
        model = determinism.lay_out(model, config).to(device)
        determinism.compile_as_asked(model, config)
        evaluated = evaluate(task, model, plan, world, precision, stream, sharing)
    assert evaluated is not None
    figures, samples = evaluated
    return step, samples, figures


def _device_of(run: Run, config: Config) -> torch.device:
    """The device to evaluate on: that of training, or the CPU where there is no GPU."""
    try:
        return pick_device(config, 1, 0)
    except NoGPU:
        log.warning("warning: %s was trained on a GPU, and torch sees none here: evaluated on the CPU", run.name)
        return torch.device("cpu")

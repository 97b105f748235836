"""One step: the micro batches of a global batch, its optimizer updates, and the stats that all ranks sum up in it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .. import faults
from ..build.loss import training_loss
from ..build.updates import Update
from ..data.order import seed_of
from ..data.plan import MicroBatch
from ..data.seeding import seed_compute
from ..run.record import Record
from .model_check import ModelCheck
from .not_finite import is_finite
from .prefetch import Prefetch
from .setup import Job
from .step_stats import COUNT, LOSS, StepStats

Fetched = tuple[MicroBatch, Any, bool]
"""A micro batch, its data on the device, and whether it is this rank's last one of the step."""


def due(job: Job, number: int) -> list[Update]:
    """Return the updates of a step (counted from 0)."""
    return [one for one in job.updates if (number + 1) % one.every == 0]


def step(
    job: Job, stats: dict[str, StepStats], number: int, prefetch: Prefetch, wants_save: bool, check: ModelCheck | None
) -> tuple[Tensor, list[bool]]:
    """Make the updates of a step (counted from 0): all micro batches of one update, then those of the next.

    Returns the stats, summed over the ranks and still on the device: one row per `due` update if there are several;
    then the norm of the gradients, if that is logged. Also returns which updates were left out (on_nan).

    Args:
        stats: this rank's stats of each update, with the values of an earlier step.
        wants_save: whether the clock asks for a checkpoint; rank 0's counts.
        check: in the first steps of an attempt.
    """
    faults.here("step")
    updates, fetched = due(job, number), _fetched(job, number, prefetch)
    if len(updates) == 1:
        sums, is_left_out = _update(job, updates[0], stats[updates[0].name], number, fetched, wants_save, check)
        return sums, [is_left_out]
    batches = list(fetched)
    made = [_update(job, one, stats[one.name], number, batches, wants_save, check) for one in updates]
    return torch.stack([sums for sums, _ in made]), [is_left_out for _, is_left_out in made]


def _fetched(job: Job, number: int, prefetch: Prefetch) -> Iterator[Fetched]:
    """Yield this rank's micro batches of a step."""
    slots = len(job.sharing.computed(job.plan.micro_batches(number)))
    consumed: list[npt.NDArray[np.int64]] = []
    for slot in range(1, slots + 1):
        micro, batch = prefetch.next()
        assert micro.step == number and not micro.evaluation
        if not micro.is_repeated:
            consumed.append(micro.indices)
        if slot == slots:  # before others can have made this step: see Loggers.samples
            job.loggers.samples(number + 1, consumed)
        yield micro, batch, slot == slots


def _update(
    job: Job, update: Update, stats: StepStats, number: int, batches: Iterable[Fetched], wants_save: bool,
    check: ModelCheck | None,
) -> tuple[Tensor, bool]:  # fmt: skip
    """Make one update. Returns its row of `step`, and whether it was left out."""
    strategy, samples, micros = update.strategy, job.plan.samples(number), job.plan.micro_batches(number)
    measures = job.config.log.gradients and job.intervals.logs(number + 1)
    update.activate()
    buffers = strategy.buffers.copies() if job.config.on_nan == "skip" else None
    strategy.begin(micros)
    if check is not None:
        check.begin()
    stats.begin(micros, wants_save and job.world.is_first)
    for micro, batch, is_last in batches:
        _micro_batch(job, update, micro, batch, stats, samples, is_last)
        if check is not None and not is_last:
            check.after_first()
    sums = stats.summed(strategy.reduce(stats.tensor()))
    if (kept := job.state.extra.losses.get(update.name)) is not None:
        kept.copy_(torch.where(sums[LOSS].isfinite(), sums, kept))
    for warning in check.end() if check is not None else ():
        if job.world.is_lead:
            job.loggers.say(warning)
    if check is not None and (reason := check.written_buffer()) and job.world.is_lead:
        _warn_not_exact(job, reason)
    if buffers is not None and not is_finite(sums, strategy.trainable, job.world):
        strategy.buffers.put_back(buffers)
        strategy.update(None)
        return torch.nn.functional.pad(sums, (0, int(measures)), value=math.nan), True
    scale = None
    if job.config.data.leaves_out or stats.counts_itself:
        # gradients are means over `samples`: make them means over what was counted, without looking at the count
        count = sums[COUNT]
        scale = (samples / count).masked_fill(count <= 0, 0.0)
    norm = strategy.scale_and_clip_gradients(update.optimizer, job.config.clip_grad_norm, scale, measures)
    if measures and norm is not None:
        sums = torch.cat([sums, norm.reshape(1).to(sums)])
    if job.optimizer_generators is not None:  # all ranks draw the same in the update, whatever batches they have had
        tag = f"update{update.name}"
        seed_compute(seed_of(job.config.seed, number), job.world.device, tag, job.optimizer_generators)
    faults.here("update")
    job.snapshots.hold()
    strategy.update(update.optimizer)
    return sums, False


def _warn_not_exact(job: Job, reason: str) -> None:
    """Write into the log and into run.json why another number of ranks would end with other bits."""

    def add(record: Record) -> None:
        known = record.get("not_exact") or []
        record["not_exact"] = known if reason in known else [*known, reason]

    job.loggers.say(f"warning: not exact: {reason}")
    job.run.note(add)


def _micro_batch(
    job: Job, update: Update, micro: MicroBatch, batch: Any, stats: StepStats, samples: int, is_last: bool
) -> None:
    """Compute forward and backward of one micro batch; without samples if none could be read.

    The weight is 0 if another rank counts the micro batch. Rank 0 never repeats one, and all ranks take over its
    buffers.
    """
    value, weight, strategy = None, 0.0, update.strategy
    with strategy.micro_batch(micro.number, is_last):
        if len(micro.indices):
            seed_compute(micro.seed, job.world.device, f"compute{update.name}", job.generators)
            with job.precision.autocast():
                loss = training_loss(update.loss, strategy.compute, batch, len(micro.indices), update.what)
            value = loss.value
            if micro.is_repeated:
                stats.counts_itself |= loss.counts_itself
            else:
                stats.add(micro.number, loss)
                weight = loss.weight / samples
        strategy.backward(value, weight, stats.tensor() if is_last else None)

"""One optimizer update: the micro batches of a global batch, and what all ranks tell each other in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from train import faults
from train.data.order import seed_of
from train.data.plan import MicroBatch
from train.data.seeding import seed_compute
from train.engine.loss import training_loss
from train.engine.meter import Meter
from train.engine.model_check import ModelCheck
from train.engine.setup import Job
from train.engine.votes import COUNT, Votes

Stream = Iterator[tuple[MicroBatch, Any]]
"""The micro batches of a rank with their data, on the device."""


def step(
    job: Job, votes: Votes, number: int, stream: Stream, meter: Meter, save: bool, check: ModelCheck | None
) -> Tensor:
    """Make the update of a step, counted from 0. Returns STEP_STATS summed over the ranks, still on the device.

    Args:
        votes: this rank's, of any step before.
        save: whether the clock says so; rank 0's counts.
        check: in the first steps of an attempt.
    """
    strategy, samples, micros = job.strategy, job.plan.samples(number), job.plan.micro_batches(number)
    slots = len(job.sharing.computed(micros))
    seen: list[npt.NDArray[np.int64]] = []
    faults.here("step")
    strategy.begin(micros)
    strategy.communication.begin()
    if check is not None:
        check.begin()
    votes.begin(micros, save and job.world.is_first)
    for slot in range(1, slots + 1):
        is_last = slot == slots
        meter.awaited.begin()
        micro, batch = next(stream)
        meter.awaited.end()
        assert micro.step == number and not micro.of_evaluation
        if not micro.is_repeated:
            seen.append(micro.indices)
        if is_last:  # before others can have made this step: see Report.samples
            job.report.samples(number + 1, seen)
        if len(micro.indices):
            _micro_batch(job, micro, batch, votes, samples, is_last)
        else:  # none of its samples could be read
            with strategy.micro_batch(micro.number, is_last):
                strategy.backward(None, 0.0, votes.cast() if is_last else None)
    reduced = votes.read(strategy.reduce(votes.cast()))
    for warning in check.end() if check is not None else ():
        if job.world.is_lead:
            job.report.say(warning)
    is_uncertain = job.config.data.leaves_out or votes.counts_itself
    scale = _to_true_mean(samples, reduced) if is_uncertain else None
    strategy.finish_gradients(job.optimizer, job.config.clip_grad_norm, scale)
    _seed_update(job, number)
    faults.here("update")
    strategy.update(job.optimizer)
    meter.samples += samples
    meter.steps += 1
    return reduced


def _seed_update(job: Job, number: int) -> None:
    """What an optimizer of the task's own draws is to be the same on all ranks, which have other batches."""
    if job.own_of_update is not None:
        seed_compute(seed_of(job.config.seed, number), job.world.device, "update", job.own_of_update)


def _to_true_mean(samples: int, reduced: Tensor) -> Tensor:
    """What makes a mean over `samples` one over what was counted. A scalar on the device, which nobody waits for."""
    count = reduced[COUNT]
    return (samples / count).masked_fill(count <= 0, 0.0)


def _micro_batch(job: Job, micro: MicroBatch, batch: Any, votes: Votes, samples: int, is_last: bool) -> None:
    """Forward and backward of one micro batch; with weight 0 where another rank counts it.

    Rank 0 never repeats one, and its buffers become everybody's.
    """
    seed_compute(micro.seed, job.world.device, own=job.own)
    with job.strategy.micro_batch(micro.number, is_last):
        with job.precision.autocast():
            loss = training_loss(job.task, job.strategy.compute, batch, len(micro.indices))
        if micro.is_repeated:
            votes.counts_itself |= loss.counts_itself
        else:
            votes.add(micro.number, loss)
        weight = 0.0 if micro.is_repeated else loss.weight / samples
        job.strategy.backward(loss.value, weight, votes.cast() if is_last else None)

"""One optimizer update: the micro batches of a global batch, and the stats that all ranks sum up in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from train import faults
from train.data.order import seed_of
from train.data.plan import MicroBatch
from train.data.seeding import seed_compute
from train.trainer.loss import training_loss
from train.trainer.model_check import ModelCheck
from train.trainer.prefetch import Prefetch
from train.trainer.setup import Job
from train.trainer.step_stats import COUNT, StepStats


def step(
    job: Job, stats: StepStats, number: int, prefetch: Prefetch, wants_save: bool, check: ModelCheck | None
) -> Tensor:
    """Make the update of a step, counted from 0. Returns the stats summed over the ranks, still on the device.

    Args:
        stats: this rank's, of any step before.
        wants_save: whether the clock asks for a checkpoint; rank 0's counts.
        check: in the first steps of an attempt.
    """
    strategy, samples, micros = job.strategy, job.plan.samples(number), job.plan.micro_batches(number)
    slots = len(job.sharing.computed(micros))
    consumed: list[npt.NDArray[np.int64]] = []
    faults.here("step")
    strategy.begin(micros)
    if check is not None:
        check.begin()
    stats.begin(micros, wants_save and job.world.is_first)
    for slot in range(1, slots + 1):
        is_last = slot == slots
        micro, batch = prefetch.next()
        assert micro.step == number and not micro.of_evaluation
        if not micro.is_repeated:
            consumed.append(micro.indices)
        if is_last:  # before others can have made this step: see Loggers.samples
            job.loggers.samples(number + 1, consumed)
        _micro_batch(job, micro, batch, stats, samples, is_last)
    sums = stats.summed(strategy.reduce(stats.tensor()))
    for warning in check.end() if check is not None else ():
        if job.world.is_lead:
            job.loggers.say(warning)
    scale = None
    if job.config.data.leaves_out or stats.counts_itself:
        # gradients are means over `samples`: make them means over what was counted, without looking at the count
        count = sums[COUNT]
        scale = (samples / count).masked_fill(count <= 0, 0.0)
    strategy.scale_and_clip_gradients(job.optimizer, job.config.clip_grad_norm, scale)
    if job.optimizer_generators is not None:  # all ranks draw the same in the update, whatever batches they have had
        seed_compute(seed_of(job.config.seed, number), job.world.device, "update", job.optimizer_generators)
    faults.here("update")
    strategy.update(job.optimizer)
    return sums


def _micro_batch(job: Job, micro: MicroBatch, batch: Any, stats: StepStats, samples: int, is_last: bool) -> None:
    """Forward and backward of one micro batch: of nothing where none of its samples could be read.

    Its weight is 0 where another rank counts it. Rank 0 never repeats one, and all ranks take over its buffers.
    """
    value, weight = None, 0.0
    with job.strategy.micro_batch(micro.number, is_last):
        if len(micro.indices):
            seed_compute(micro.seed, job.world.device, own=job.generators)
            with job.precision.autocast():
                loss = training_loss(job.task, job.strategy.compute, batch, len(micro.indices))
            value = loss.value
            if micro.is_repeated:
                stats.counts_itself |= loss.counts_itself
            else:
                stats.add(micro.number, loss)
                weight = loss.weight / samples
        job.strategy.backward(value, weight, stats.tensor() if is_last else None)

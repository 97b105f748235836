"""One optimizer update: the micro batches of a global batch, and what all ranks tell each other in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from train import faults
from train.data.order import seed_of
from train.data.plan import MicroBatch
from train.data.seeding import owned, seed_compute
from train.engine import counted, uneven
from train.engine.loss import training_loss
from train.engine.meter import Meter
from train.engine.quiet import quiet
from train.engine.setup import Job
from train.engine.untouched import untouched
from train.engine.votes import COUNT, COUNTED, Votes

_NOTHING = contextlib.nullcontext()
_WATCHED = 2
"""Steps of an attempt in which it is looked whether forwards change parameters. In the first one a teacher that begins
as its student does not move by a bit."""
_LATE = (
    "warning: the first step has made a random generator that the model or the loss keeps: nothing seeds it, and a "
    "resume draws from its beginning; make it in model(), or at the top of the file"
)
Stream = Iterator[tuple[MicroBatch, Any]]
"""The micro batches of a rank with their data, on the device."""


def step(job: Job, votes: Votes, number: int, stream: Stream, meter: Meter, save: bool, made: int) -> Tensor:
    """Make the update of a step, counted from 0. Returns VOTES summed over the ranks, still on the device.

    Args:
        votes: this rank's, of any step before.
        save: whether the clock says so; rank 0's counts.
        made: steps of this attempt before it.
    """
    is_first = made == 0
    strategy, samples, micros = job.strategy, job.plan.samples(number), job.plan.micro_batches(number)
    counters = counted.numbers(strategy.module) if is_first else {}
    slots = job.sharing.slots(micros)
    seen: list[npt.NDArray[np.int64]] = []
    faults.here("step")
    strategy.begin(micros)
    strategy.exposed.begin()
    if made < _WATCHED:
        strategy.watch()
    votes.begin(micros, save and job.world.is_first)
    for slot, own in enumerate(slots, 1):
        is_last = slot == len(slots)
        if own is None and not strategy.lends_data:
            job.report.samples(number + 1, seen)
            strategy.idle(votes.cast())  # only in the last slot, and only on some ranks
            continue
        meter.awaited.begin()
        micro, batch = next(stream)
        meter.awaited.end()
        assert micro.step == number and not micro.of_evaluation
        if not micro.is_lent:
            seen.append(micro.indices)
        if is_last:  # before others can have made this step: see Report.samples
            job.report.samples(number + 1, seen)
        if not len(micro.indices) and not strategy.lends_data:  # none of its samples could be read
            strategy.skip(micro.number)
            if is_last:
                strategy.idle(votes.cast())
            continue
        waits_for = uneven.doubt(job.plan, job.sharing, number, job.total_steps, is_first, is_last)
        _micro_batch(job, micro, batch, votes, samples, is_last, waits_for)
    reduced = votes.read(strategy.reduce(votes.cast()))
    if made < _WATCHED:
        strategy.follow(is_new=number < _WATCHED)
    if is_first:
        strategy.check_state()
        _tell(job, counted.warning(counters, counted.numbers(strategy.module)))
        _tell(job, _LATE if len(owned(strategy.module, job.task.loss)) > len(job.own) else "")
    if job.config.data.leaves_out or votes.counts_itself:
        strategy.scale_gradients(_to_true_mean(samples, reduced))
    elif not votes.fed:  # this rank had no data, and the others know whether the task counts by itself
        strategy.scale_gradients(_to_true_mean(samples, reduced).masked_fill(reduced[COUNTED] == 0, 1.0))
    strategy.settle(job.optimizer, job.config.clip_grad_norm)
    _seed_update(job, number)
    job.snapshots.begin_update()
    faults.here("update")
    strategy.update(job.optimizer)
    meter.samples += samples
    meter.steps += 1
    return reduced


def _seed_update(job: Job, number: int) -> None:
    """What an optimizer of the task's own draws is to be the same on all ranks, which have other batches."""
    if job.own_of_update is not None:
        seed_compute(seed_of(job.config.seed, number), job.world.device, "update", job.own_of_update)


def _tell(job: Job, warning: str) -> None:
    if warning and job.world.is_lead:
        job.report.say(warning)


def _to_true_mean(samples: int, reduced: Tensor) -> Tensor:
    """What makes a mean over `samples` one over what was counted. A scalar on the device, which nobody waits for."""
    count = reduced[COUNT]
    return (samples / count).masked_fill(count <= 0, 0.0)


def _micro_batch(
    job: Job, micro: MicroBatch, batch: Any, votes: Votes, samples: int, is_last: bool, waits_for: str
) -> None:
    """Forward and backward of one micro batch; with weight 0 where it is not this rank's own."""
    is_own = bool(len(micro.indices)) and not micro.is_lent
    if job.spare is not None:
        found = job.spare.instead_of(micro, batch)
        if found is None:
            return
        micro, batch = found
    # statistics are of what ranks have themselves; a resume would lend other data
    leaving = _NOTHING if is_own else untouched(job.strategy.module)
    seed_compute(micro.seed, job.world.device, own=job.own)
    with leaving, job.strategy.micro_batch(micro.number, is_last):
        with job.precision.autocast(), job.snapshots.aside, quiet("loss", job.task.file, waits_for):
            loss = training_loss(job.task, job.strategy.compute, batch, len(micro.indices))
        if is_own:
            votes.add(micro.number, loss)
        weight = loss.weight / samples if is_own else 0.0
        job.strategy.backward(loss.value, weight, votes.cast() if is_last else None)

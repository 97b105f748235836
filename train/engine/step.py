"""One optimizer update: the micro batches of a global batch, and what all ranks tell each other in it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from train import faults
from train.data.plan import MicroBatch
from train.data.seeds import seed_compute
from train.engine import uneven
from train.engine.loss import Figure, training_loss
from train.engine.meter import Meter
from train.engine.quiet import quiet
from train.engine.setup import Job
from train.parallel.strategy import VOTES

Stream = Iterator[tuple[MicroBatch, Any]]
"""The micro batches of a rank with their data, on the device."""

_COUNT, _COUNTED = VOTES.index("count"), VOTES.index("counted")


class _Sums:
    """What one rank adds up in a step, to be summed over all."""

    def __init__(self, job: Job, save: bool, micros: int) -> None:
        self._job, self._save = job, save
        self._parts: Tensor | None = None
        """Where sums must not depend on who makes them: total and count of each micro batch, to be added in order."""
        if job.strategy.is_ordered:
            self._parts = torch.zeros(micros, 2, dtype=job.strategy.votes_type, device=job.world.device)
        self.total: Any = 0.0
        self.count: Any = 0.0
        self.counts_itself = False
        self.seen: list[npt.NDArray[np.int64]] = []
        self.fed = False
        """Whether this rank has computed on data."""

    def add(self, number: int, found: Figure) -> None:
        """Take in the loss of a micro batch."""
        self.fed = True
        self.counts_itself |= found.counts_itself
        total, count = found.total(self._job.strategy.votes_type), found.counted()
        if self._parts is None:
            self.total = self.total + total
            self.count = self.count + count
        else:
            self._parts[number, 0] = total
            self._parts[number, 1] = count

    def votes(self) -> Tensor:
        """VOTES of this rank, on the device; before them, where sums are made in order, what they are made of."""
        if self._parts is not None:
            return torch.cat([self._parts.reshape(-1), self._votes()])
        return self._votes()

    def read(self, reduced: Tensor) -> Tensor:
        """VOTES summed over the ranks, from what was made of `votes`."""
        if self._parts is None:
            return reduced
        # each part is one rank's, and zeros of the others round nothing
        parts, votes = reduced[: self._parts.numel()].view_as(self._parts), reduced[self._parts.numel() :]
        return torch.cat([parts.sum(0), votes[2:]])

    def _votes(self) -> Tensor:
        job, dtype = self._job, self._job.strategy.votes_type
        flags = [float(job.stop.asked), float(self._save and job.world.is_first), float(self.counts_itself)]
        if isinstance(self.total, Tensor) or isinstance(self.count, Tensor):
            parts = [torch.as_tensor(part, dtype=dtype, device=job.world.device) for part in (self.total, self.count)]
            return torch.cat([torch.stack(parts), torch.tensor(flags, dtype=dtype, device=job.world.device)])
        return torch.tensor([self.total, self.count, *flags], dtype=dtype, device=job.world.device)


def step(job: Job, number: int, stream: Stream, meter: Meter, save: bool, is_first: bool) -> Tensor:
    """Make the update of a step, counted from 0. Returns VOTES summed over the ranks, still on the device.

    Args:
        save: whether the clock says so; rank 0's counts.
        is_first: of this attempt.
    """
    strategy, world = job.strategy, job.world
    samples = job.plan.samples(number)
    micros = job.plan.micro_batches(number)
    slots = job.sharing.slots(micros)
    sums = _Sums(job, save, micros)
    faults.here("step")
    strategy.begin(micros)
    for slot, own in enumerate(slots):
        is_last = slot == len(slots) - 1
        if own is None and not strategy.lends_data:
            strategy.idle(sums.votes())  # only in the last slot, and only on some ranks
            continue
        before = time.perf_counter()
        micro, batch = next(stream)
        assert micro.step == number and not micro.of_evaluation
        meter.waited += time.perf_counter() - before
        if not micro.is_lent:
            sums.seen.append(micro.indices)
        if not len(micro.indices) and not strategy.lends_data:  # none of its samples could be read
            strategy.skip(micro.number)
            if is_last:
                strategy.idle(sums.votes())
            continue
        waits_for = ""
        if not strategy.lends_data:
            waits_for = uneven.doubt(
                job.plan, world.size, number, job.total_steps, is_first, is_last, strategy.is_ordered
            )
        _micro_batch(job, micro, batch, sums, samples, is_last, waits_for)
    reduced = sums.read(strategy.reduce(sums.votes()))
    # a rank without data does not know whether its task counts by itself: ask the others' answer in that rare case
    if job.leaves_out or sums.counts_itself or (not sums.fed and reduced[_COUNTED].item() > 0):
        true_count = reduced[_COUNT]
        strategy.scale_gradients(torch.where(true_count > 0, samples / true_count, 0.0))
    strategy.update(job.optimizer, job.config.clip_grad_norm)
    job.report.samples(number + 1, sums.seen)
    meter.samples += samples
    meter.steps += 1
    return reduced


def _micro_batch(
    job: Job, micro: MicroBatch, batch: Any, sums: _Sums, samples: int, is_last: bool, waits_for: str
) -> None:
    """Forward and backward of one micro batch; with weight 0 where it is not this rank's own."""
    is_own = bool(len(micro.indices)) and not micro.is_lent
    if job.spare is not None:
        found = job.spare.instead_of(micro, batch)
        if found is None:
            return
        micro, batch = found
    seed_compute(micro.seed, job.world.device)
    with job.strategy.micro_batch(micro.number, is_last):
        with job.precision.autocast(), quiet("loss", job.task.file, waits_for):
            loss = training_loss(job.task, job.strategy.call, batch, len(micro.indices))
        if is_own:
            sums.add(micro.number, loss)
        weight = loss.weight / samples if is_own else 0.0
        job.strategy.backward(loss.value, weight, sums.votes() if is_last else None)

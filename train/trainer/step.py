"""One step of training, on one page: micro batches, forward, backward, clipping, the update, and the step's stats."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .. import faults
from ..data.order import seed_of
from ..data.plan import MicroBatch
from ..data.seeding import seed_compute
from .model_check import ModelCheck
from .not_finite import is_finite
from .prefetch import Prefetch
from .setup import Job
from .step_stats import LOSS, STATS, StepResult, StepStats

Fetched = tuple[MicroBatch, Any, bool]
"""A micro batch, its data on the device, and whether it is this rank's last one of the step."""


def step(job: Job, number: int, prefetch: Prefetch, stats_of: dict[str, StepStats], check: ModelCheck) -> StepResult:
    """Make one step (counted from 0): forward and backward of this rank's micro batches, then the optimizer's update.

    A task with several updates (a GAN) makes them in turn, each on all micro batches of the step.

    Args:
        stats_of: this rank's stats of each update, by the update's name.
        check: checks the model in the first steps of an attempt, and does nothing in later ones.
    """
    samples, micros = job.data.plan.samples(number), job.data.plan.micro_batches(number)  # of all ranks together
    measures_norm = job.config.log.gradients and job.intervals.logs(number + 1)
    updates = [update for update in job.updates if update.is_due(number)]
    fetched = _fetch(job, number, prefetch)
    batches = list(fetched) if len(updates) > 1 else fetched  # several updates need them all, one takes one at a time
    norms: list[Tensor] = []
    result = StepResult({}, {}, [])
    for update in updates:
        strategy, stats = update.strategy, stats_of[update.name]
        update.activate()  # only its own parameters require gradients
        buffers_before = strategy.buffers.copies() if job.config.on_nan == "skip" else None
        strategy.begin(micros)
        stats.begin(micros)
        check.begin()

        # Accumulate the gradients of this rank's micro batches, each weighted by its share of the global batch. The
        # last backward also sums gradients and stats over the ranks.
        for micro, batch, is_last in batches:
            loss = None
            with strategy.micro_batch(micro.number, is_last):
                if len(micro.indices):  # else none of its samples could be read
                    seed_compute(micro.seed, job.world.device, tag=f"compute{update.name}", own=job.generators)
                    with job.precision.autocast():
                        loss = update.compute_loss(batch, len(micro.indices))
                    stats.add(micro.number, loss, is_repeated=micro.is_repeated)
                if is_last:
                    stats.parts.fix(job.world, strategy.communication)
                weight = 0.0 if loss is None or micro.is_repeated else loss.weight / samples
                strategy.backward(None if loss is None else loss.value, weight, stats.tensor() if is_last else None)
            del loss  # frees its graph before the next forward
            check.after_micro_batch(is_last)
        sums = result.sums[update.name] = stats.summed(strategy.reduce(stats.tensor()))
        _report(job, check)

        # With on_nan skip, all ranks leave out the update if the loss or a gradient is not finite.
        if buffers_before is not None and not is_finite(sums[: len(STATS)], strategy.trainable, job.world):
            strategy.buffers.put_back(buffers_before)
            strategy.update(None)  # clears the gradients
            result.left_out.append(update.name)
            norms.append(torch.full_like(sums[LOSS], math.nan, dtype=torch.float64))
            continue

        # So far gradients are means over the samples of the step. Make them means over what the loss counted; clip.
        scale, clip = stats.scale(sums, samples), job.config.clip_grad_norm
        norm = strategy.scale_and_clip_gradients(update.optimizer, clip_norm=clip, scale=scale, measures=measures_norm)
        if measures_norm and norm is not None:
            norms.append(norm.double())

        # Update. An optimizer that draws random numbers draws the same on all ranks, whatever their batches drew.
        if job.optimizer_generators is not None:
            seed = seed_of(job.config.seed, number)
            seed_compute(seed, job.world.device, tag=f"update{update.name}", own=job.optimizer_generators)
        faults.here("update")
        job.snapshots.hold()  # a snapshot that is still being copied must not get new weights
        strategy.update(update.optimizer)

    # Figures beside the loss. To add one, see "A figure of a step" in docs/contributing.md.
    if measures_norm:
        result.figures["grad_norm"] = functools.reduce(torch.hypot, norms)
    return result


def _fetch(job: Job, number: int, prefetch: Prefetch) -> Iterator[Fetched]:
    """Yield this rank's micro batches of a step one by one, and write the step's line of the sample log."""
    slots = len(job.sharing.computed(job.data.plan.micro_batches(number)))  # the same on every rank
    consumed: list[npt.NDArray[np.int64]] = []
    for slot in range(1, slots + 1):
        micro, batch = prefetch.next()
        assert micro.step == number and not micro.evaluation
        if not micro.is_repeated:
            consumed.append(micro.indices)
        if slot == slots:  # before other ranks can have made this step: see Loggers.samples
            job.loggers.samples(number + 1, consumed)
        yield micro, batch, slot == slots


def _report(job: Job, check: ModelCheck) -> None:
    """Report what the check of a first step found: in the log, and in run.json what makes the run not exact."""
    for warning in check.end():
        job.loggers.say(warning)
    if reason := check.written_buffer():
        note_not_exact(job, reason)


def note_not_exact(job: Job, reason: str) -> None:
    """Say why the run is not exact, and write it into run.json."""
    if not job.world.is_lead:
        return

    job.loggers.say(f"warning: not exact: {reason}")
    job.run.note_not_exact(reason)

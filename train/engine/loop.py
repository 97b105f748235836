"""The training loop. It reads top to bottom like its description in docs/how-it-works.md."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from train import config as configuration
from train import faults
from train.checkpoint.saver import CannotSave
from train.data.plan import MicroBatch, Plan, evaluation_micro_batches, micro_batches_of
from train.data.seeds import seed_compute
from train.engine import schedule, uneven
from train.engine.evaluate import evaluate
from train.engine.quiet import quiet
from train.engine.readback import Readback
from train.engine.setup import Done, Job
from train.engine.skipped import FILE as SKIPPED
from train.engine.wait import DataWait
from train.errors import TrainingFailed
from train.parallel.replica import TAIL
from train.record import heartbeat
from train.tasks import Task

_LOOK_AHEAD = 4096
"""Steps among which the next evaluation is looked for at a time."""
_EMPTY_STEPS = 10
"""Steps in a row without a sample that can be read after which a run has failed."""


def train(job: Job, done: int) -> Done:
    """Train from step `done` to the end, or to a polite stop. Steps are counted from 1 in everything reported.

    Raises:
        TrainingFailed: the loss is not finite, or the last checkpoint cannot be saved.
    """
    config, plan, world, report = job.config, job.plan, job.world, job.report
    rates = [group["lr"] * schedule.scale(config) for group in job.optimizer.param_groups]
    stream = job.loader.batches(_micro_batches(job, done))
    readback = Readback[_Step](world.device)
    clock = _Clock(config.checkpoint.every_minutes)
    meter = _Meter(DataWait(job.run.name, config.data.workers, world.size))
    begun, saved, stopping = done, done, False
    metrics: dict[str, float] | None = None
    job.replica.module.train()
    job.replica.settle()

    try:
        while done < job.total_steps or _evaluation_due(job, done):
            if done < job.total_steps and not _evaluation_due(job, done):
                factor = schedule.factor(config, done, plan.steps_per_epoch, job.total_steps)
                for group, rate in zip(job.optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * factor
                sums = _step(job, done, stream, meter, save=clock.is_due(), is_first=done == begun)
                done += 1
                job.heart.beat(heartbeat.TRAINING, done)
                if not job.saver.is_prepared:
                    job.saver.prepare(job.replica.module, job.optimizer)
                readback.put(_Step(done, rates[0] * factor, plan.samples(done - 1)), sums)

            save = done == job.total_steps or _save_due(job, done)
            boundary = save or _evaluation_due(job, done)
            for step, values in readback.take(everything=boundary):
                stop_asked, save_asked = _digest(job, step, values, meter)
                stopping |= stop_asked
                save |= save_asked
            if (save or stopping) and done > saved:
                for step, values in readback.take(everything=True):
                    stopping |= _digest(job, step, values, meter)[0]
                if _save(job, done, is_last=stopping or done == job.total_steps):
                    saved = done
                clock.restart()
            if not stopping and _evaluation_due(job, done):
                faults.here("evaluate")
                assert job.evaluation is not None
                evaluated = evaluate(
                    job.task, job.replica.module, job.evaluation, world, job.precision, stream,
                    lambda: job.stop.asked, functools.partial(job.heart.beat, heartbeat.EVALUATING, done),
                )  # fmt: skip
                stopping |= evaluated is None
                if evaluated is not None:
                    metrics, samples = evaluated
                    job.evaluated = done
                    if world.is_first:
                        report.evaluation(done, _epoch(plan, done), samples, metrics)
                if stopping and done > saved:
                    _save(job, done, is_last=True)
                meter.restart()
            if stopping:
                break
        if not _settle(job) and stopping:  # the save of this very step was under way when the stop came, and failed
            _save(job, done, is_last=True)
    except TrainingFailed:
        # every rank fails at this step; the checkpoint before it may still be on its way to the disk
        with contextlib.suppress(Exception):
            job.saver.settle()
        raise
    return Done(done, stopping and (done < job.total_steps or _evaluation_due(job, done)), metrics)


def _micro_batches(job: Job, done: int) -> Iterator[MicroBatch]:
    """All that this rank fetches after step `done`, evaluations among it, in the order in which `train` takes it."""
    rank, size, evaluated = job.world.rank, job.world.size, job.evaluated
    first = done
    for step in range(done, job.total_steps + 1):
        # by what was on record at the start: this runs ahead of the loop
        is_evaluated = evaluated < step and _is_evaluated(job, step)
        if is_evaluated or step - first == _LOOK_AHEAD:
            yield from micro_batches_of(job.plan, rank, size, first, step)
            first = step
        if is_evaluated:
            assert job.evaluation is not None
            yield from evaluation_micro_batches(job.evaluation, rank, size)
    yield from micro_batches_of(job.plan, rank, size, first, job.total_steps)


def _step(job: Job, step: int, stream: Iterator[Any], meter: _Meter, save: bool, is_first: bool) -> Tensor:
    """One optimizer update (counted from 0). Returns TAIL summed over the ranks, still on the device."""
    replica, world, plan, precision = job.replica, job.world, job.plan, job.precision
    samples = plan.samples(step)
    slots, micros = plan.slots(step, world.size), plan.micro_batches(step)
    faults.here("step")
    total: Any = 0.0
    count: Any = 0.0
    counted = 0.0
    seen = []
    fed = False

    def tail() -> Tensor:
        flags = [float(job.stop.asked), float(save and world.is_first), counted]
        if isinstance(total, Tensor) or isinstance(count, Tensor):
            parts = [torch.as_tensor(part, device=world.device).detach() for part in (total, count)]
            numbers = torch.stack([part.to(replica.tail.dtype).reshape(()) for part in parts])
            return torch.cat([numbers, torch.tensor(flags, dtype=replica.tail.dtype, device=world.device)])
        return torch.tensor([total, count, *flags], dtype=replica.tail.dtype, device=world.device)

    for slot in range(slots):
        is_last = slot == slots - 1
        if slot * world.size + world.rank >= micros:  # only in the last slot, and only on some ranks
            replica.backward_without_data(tail())
            continue
        before = time.perf_counter()
        micro, batch = next(stream)
        assert micro.step == step and not micro.of_evaluation
        meter.waited += time.perf_counter() - before
        seen.append(micro.indices)
        if not len(micro.indices):  # none of its samples could be read
            if is_last:
                replica.backward_without_data(tail())
            continue
        fed = True
        seed_compute(micro.seed, world.device)
        with replica.accumulating(more=not is_last):
            waits_for = uneven.doubt(plan, world.size, step, job.total_steps, is_first, is_last)
            with precision.autocast(), quiet("loss", job.task.file, waits_for):
                value = job.task.loss(replica.call, batch)
            if isinstance(value, tuple) and len(value) == 2:
                value, own_count = value
                if not isinstance(value, Tensor) or not isinstance(own_count, (Tensor, int, float)):
                    raise TrainingFailed(
                        f"loss in {job.task.file} must return (total, count) as a scalar tensor and a number; "
                        f"got ({type(value).__name__}, {type(own_count).__name__})"
                    )
                counted = 1.0
                total = total + value.detach()
                count = count + own_count
                weight = 1 / samples
            else:
                _check_scalar(value, job.task)
                value = value.reshape(())
                total = total + value.detach() * len(micro.indices)
                count += len(micro.indices)
                weight = len(micro.indices) / samples
            replica.backward(value, weight, tail() if is_last else None)
    sums = replica.reduced(tail())
    # a rank without data does not know whether its task counts by itself: ask the others' answer in that rare case
    if job.leaves_out or counted or (not fed and sums[TAIL.index("counted")].item() > 0):
        true_count = sums[TAIL.index("count")]
        replica.scale_gradients(torch.where(true_count > 0, samples / true_count, 0.0))
    _update(job)
    # here, not before the forward: evaluations and checkpoints, of which every rank writes a part, read buffers too
    replica.sync_buffers()
    replica.clear()
    job.report.samples(step + 1, seen)
    meter.samples += samples
    meter.steps += 1
    return sums


def _update(job: Job) -> None:
    scaler = job.precision.scaler
    if scaler is not None:
        scaler.unscale_(job.optimizer)
    if job.config.clip_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(job.replica.trainable, job.config.clip_grad_norm)
    if scaler is not None:
        scaler.step(job.optimizer)
        scaler.update()
    else:
        job.optimizer.step()


def _check_scalar(value: Any, task: Task) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TrainingFailed(
            f"loss in {task.file} must return a scalar tensor, the mean over the batch, or (total, count); got {shape}"
        )
    if not value.requires_grad:
        raise TrainingFailed(f"loss in {task.file} does not depend on the model's parameters: call model(...) in it")


def _digest(job: Job, step: _Step, values: list[float], meter: _Meter) -> tuple[bool, bool]:
    """Look at the sums of a step; write its line. Returns whether to stop and whether to save."""
    named = dict(zip(TAIL, values, strict=True))
    by_count = named["counted"] or job.leaves_out
    loss = named["loss"] / (named["count"] if by_count else step.samples) if named["count"] else 0.0
    if not math.isfinite(loss):
        raise TrainingFailed(
            f"the loss is {loss} at step {step.number}; lower --optim.lr or set --clip_grad_norm, "
            "and look at the data of that step (--log.samples true)"
        )
    meter.empty = 0 if named["count"] or not job.leaves_out else meter.empty + 1
    if meter.empty == _EMPTY_STEPS or (meter.empty and step.number == meter.empty == job.total_steps):
        raise TrainingFailed(
            f"not one sample could be read in {meter.empty} steps in a row, up to step {step.number}; "
            f"why, says {SKIPPED} in the run folder"
        )
    plan, config = job.plan, job.config
    epoch = _epoch(plan, step.number)
    if job.world.is_first and (step.number % config.log.every_steps == 0 or step.number == job.total_steps):
        line = {"step": step.number, "epoch": epoch, "loss": loss, "lr": step.rate, **meter.read(job.world.device)}
        job.report.training(line)
        job.report.progress(step.number, epoch, loss, line["samples_per_s"])
        advice = meter.wait.advice(step.number == job.total_steps)
        if advice:
            job.report.say(f"warning: {advice}")
            job.run.note(data_wait=advice)
    return named["stop"] > 0, named["save"] > 0


def _epoch(plan: Plan, done: int) -> int:
    """The epoch, counted from 1, in which step `done` (counted from 1) lies."""
    return plan.epoch(done - 1) + 1


def _save_due(job: Job, done: int) -> bool:
    """Whether a checkpoint belongs to this step, whatever the clock says."""
    checkpoint = job.config.checkpoint
    if checkpoint.best and _evaluation_due(job, done):
        return True
    return checkpoint.every_steps is not None and done % checkpoint.every_steps == 0


def _evaluation_due(job: Job, done: int) -> bool:
    """Whether step `done` ends with an evaluation that is not on record yet."""
    return job.evaluated < done and _is_evaluated(job, done)


def _is_evaluated(job: Job, done: int) -> bool:
    """Whether step `done` ends with an evaluation."""
    if job.evaluation is None or done == 0:
        return False
    if done == job.total_steps:
        return True
    every = job.config.eval.every_epochs * job.plan.steps_per_epoch
    return every > 0 and math.floor(done / every) > math.floor((done - 1) / every)


def _save(job: Job, done: int, is_last: bool) -> bool:
    """Commit a checkpoint of step `done`. Whether it is there now.

    Raises:
        TrainingFailed: the weights are not finite, or this was the last chance to save.
    """
    for name, parameter in job.replica.module.named_parameters():
        if not torch.isfinite(parameter).all():
            raise TrainingFailed(f"{name} is not finite after step {done}; the checkpoint before it is kept")
    scaler = job.precision.scaler
    facts = {
        "epoch": _epoch(job.plan, done),
        "world_size": job.world.size,
        "samples": job.plan.length,
        "config": configuration.to_flat(job.config),
        "task_sha256": job.task.sha256,
        "torch": torch.__version__,
        "scaler": scaler.state_dict() if scaler is not None else None,
    }
    job.heart.beat(heartbeat.SAVING, done)
    _settle(job)
    try:
        # a checkpoint must find the lines of all steps before it on the disk
        problem = job.report.sync()
        if job.world.any(bool(problem)):
            raise CannotSave(f"metrics and sample logs cannot be written: {problem or 'see the other ranks'}")
        job.saver.save(done, job.replica.module, job.optimizer, facts)
        if is_last:
            job.saver.settle()
    except CannotSave as error:
        if is_last:
            raise TrainingFailed(f"the checkpoint of step {done} could not be saved: {error}") from error
        _warn_unsaved(job, error)
        return False
    return True


def _settle(job: Job) -> bool:
    """Wait for the checkpoint that is being written in the background. Whether all is well."""
    try:
        job.saver.settle()
    except CannotSave as error:
        _warn_unsaved(job, error)
        return False
    return True


def _warn_unsaved(job: Job, error: CannotSave) -> None:
    job.report.say(f"warning: a checkpoint could not be saved ({error}); training goes on and tries again")


@dataclasses.dataclass(frozen=True)
class _Step:
    number: int
    rate: float
    samples: int


class _Clock:
    """Says when so many minutes have passed since the last save. Rank 0's clock decides for all."""

    def __init__(self, minutes: float, now: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._now = minutes * 60, now
        self.restart()

    def restart(self) -> None:
        self._since = self._now()

    def is_due(self) -> bool:
        return self._seconds > 0 and self._now() - self._since >= self._seconds


class _Meter:
    """Speed since the last line."""

    def __init__(self, wait: DataWait) -> None:
        self.wait = wait
        self.empty = 0
        """Steps in a row of which no sample could be read."""
        self.restart()

    def restart(self) -> None:
        self._since = time.perf_counter()
        self.waited = 0.0
        self.samples = self.steps = 0

    def read(self, device: torch.device) -> dict[str, float]:
        """samples_per_s; data_wait and step_time in seconds per step; memory in bytes, the highest so far."""
        elapsed = max(time.perf_counter() - self._since, 1e-9)
        steps = max(self.steps, 1)
        self.wait.add(self.waited, elapsed)
        if device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(device)
        else:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        figures = {
            "samples_per_s": self.samples / elapsed,
            "data_wait": self.waited / steps,
            "step_time": elapsed / steps,
            "memory": memory,
        }
        self.restart()
        return figures

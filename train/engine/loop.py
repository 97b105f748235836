"""The training loop. It reads top to bottom like its description in docs/how-it-works.md."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import NamedTuple

import torch

from train import config as configuration
from train import faults
from train.checkpoint.saver import CannotSave
from train.engine import schedule
from train.engine.account import Account
from train.engine.agenda import micro_batches
from train.engine.evaluate import evaluate
from train.engine.meter import Clock, Meter
from train.engine.model_check import STEPS, ModelCheck
from train.engine.readback import Readback
from train.engine.setup import Done, Job
from train.engine.skipped import FILE as SKIPPED
from train.engine.step import step
from train.engine.votes import Votes
from train.engine.wait import DataWait
from train.errors import TrainingFailed
from train.parallel.strategy import STEP_STATS
from train.record import heartbeat
from train.record.metrics import Training
from train.record.record import Times

_EMPTY_STEPS = 10
"""Steps in a row without a sample that can be read after which a run has failed."""


def train(job: Job, done: int) -> Done:
    """Train from step `done` to the end, or to a polite stop. Steps are counted from 1 in everything reported.

    Raises:
        TrainingFailed: the loss is not finite, or the last checkpoint cannot be saved.
    """
    loop, agenda = _Loop(job, done), job.agenda
    job.strategy.module.train()
    with loop.account.spent("start"):
        job.strategy.start()
    try:
        if agenda.misses_save(job.saved, done):  # a death came before: the state is from memory
            loop.save()
        if agenda.evaluates(done) and job.evaluated < done:  # it ended before the evaluation that was due
            loop.evaluate()
        while loop.done < agenda.total_steps and not loop.is_stopping:
            loop.step()
            save, evaluates = agenda.saves(loop.done), agenda.evaluates(loop.done)
            save |= loop.read_votes(everything=save or evaluates)
            loop.copy()
            if save or loop.is_stopping:
                loop.save()
            if evaluates and not loop.is_stopping:
                loop.evaluate()
        loop.finish_saving()
    except TrainingFailed:
        # every rank fails at this step; the checkpoint before it may still be on its way to the disk
        with contextlib.suppress(Exception):
            job.saver.wait()
        job.report.times(loop.times())
        raise
    return Done(loop.done, loop.is_stopping and not loop.is_complete, loop.times())


class _Step(NamedTuple):
    number: int
    rate: float
    samples: int


class _Loop:
    """Where training stands, and the things it does in turn."""

    def __init__(self, job: Job, done: int) -> None:
        self.job, self.done, self.account = job, done, Account()
        self.is_stopping = False
        self._begun, self._saved = done, job.saved
        self._rates = [group["lr"] * schedule.scale(job.config) for group in job.optimizer.param_groups]
        # a task's may be a tensor, on a GPU: to look at one there waits for it, so once and not in every step
        self._told_rate = float(self._rates[0])
        wait = DataWait(job.run.name, job.config.data.workers or 0, job.world.node.size)
        self._meter = Meter(wait, job.world.device)
        self._stream = job.loader.batches(
            micro_batches(job.agenda, job.plan, job.evaluation, job.sharing, done, job.evaluated),
            self._meter.awaited.arrived,
        )
        self._check = ModelCheck(job.strategy.module, job.task.loss, job.own)
        self._votes = Votes(
            job.strategy.stats_dtype, job.world.device, job.strategy.is_ordered, job.stop, job.snapshots.vote
        )
        self._readback = Readback[_Step](job.world.device)
        from_memory = job.saved < done  # deaths must not put off what the disk is to have
        self._clock = Clock(job.config.checkpoint.every_minutes, job.run.since_saved(job.saved) if from_memory else 0.0)
        self._known = done
        """The last step whose stats were read, and whose line is written."""
        self._copies: list[float] = []
        """What the ranks said of a copy, in the steps read since the last call of `copy`."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do."""
        is_evaluated = self.job.evaluated >= self.done or not self.job.agenda.evaluates(self.done)
        return self.done >= self.job.total_steps and is_evaluated

    def step(self) -> None:
        """The next step."""
        job = self.job
        factor = schedule.factor(job.config, self.done, job.plan.steps_per_epoch, job.total_steps)
        for group, rate in zip(job.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        check = self._check if self.done - self._begun < STEPS else None
        sums = step(job, self._votes, self.done, self._stream, self._meter, self._clock.is_due(), check)
        self.done += 1
        job.heart.beat(heartbeat.TRAINING, self.done)
        if not job.saver.is_prepared:
            job.saver.prepare(job.strategy.module, job.optimizer)
        self._readback.put(_Step(self.done, self._told_rate * factor, job.plan.samples(self.done - 1)), sums)

    def read_votes(self, everything: bool) -> bool:
        """Look at what the ranks said in the steps that can be read by now. Whether one of them asks for a save.

        Args:
            everything: wait for the last step's too.
        """
        save = False
        for made, values in self._readback.take(everything):
            votes = dict(zip(STEP_STATS, values, strict=True))
            self._look_at(made, votes)
            self._known = made.number
            self._copies.append(votes["copy"])
            self.is_stopping |= votes["stop"] > 0
            save |= votes["save"] > 0
        return save

    def copy(self) -> None:
        """Let the state be copied into memory, where that is due."""
        sums, self._copies = self._copies, []
        self.job.snapshots.after_step(self.done, sums, self._known)

    def _look_at(self, made: _Step, votes: dict[str, float]) -> None:
        """Check the loss of a step; write its line."""
        job, meter, leaves_out = self.job, self._meter, self.job.config.data.leaves_out
        loss = self._loss(made, votes)
        if not math.isfinite(loss):
            raise TrainingFailed(
                f"the loss is {loss} at step {made.number}; lower --optim.lr or set --clip_grad_norm, "
                "and look at the data of that step (--log.samples true)"
            )
        meter.empty = 0 if votes["count"] or not leaves_out else meter.empty + 1
        if meter.empty == _EMPTY_STEPS or (meter.empty and made.number == meter.empty == job.total_steps):
            raise TrainingFailed(
                f"not one sample could be read in {meter.empty} steps in a row, up to step {made.number}; "
                f"why, says {SKIPPED} in the run folder"
            )
        if self._is_told(made) and job.world.is_lead:
            self._write(made, loss)

    def _is_told(self, made: _Step) -> bool:
        """Whether a line belongs to a step."""
        return made.number % self.job.config.log.every_steps == 0 or made.number == self.job.total_steps

    def times(self) -> Times:
        """Where the time of this attempt has gone so far, on this rank."""
        strategy = self.job.strategy
        communication = strategy.communication.seconds() if strategy.measures_communication else None
        return self.account.read(self.done, self._meter.awaited.seconds(), communication)

    def _loss(self, made: _Step, votes: dict[str, float]) -> float:
        by_count = votes["counted"] or self.job.config.data.leaves_out
        return votes["loss"] / (votes["count"] if by_count else made.samples) if votes["count"] else 0.0

    def _write(self, made: _Step, loss: float) -> None:
        job = self.job
        epoch, speed = job.plan.epoch_of(made.number), self._meter.read(job.world.device)
        line: Training = {"step": made.number, "epoch": epoch, "loss": loss, "lr": made.rate, **speed}
        job.report.training(line)
        job.report.progress(made.number, line["epoch"], loss, line["samples_per_s"], self.times)
        advice = self._meter.wait.advice(made.number == job.total_steps)
        if advice:
            job.report.say(f"warning: {advice}")
            job.run.note(data_wait=advice)

    def evaluate(self) -> None:
        """Evaluate, unless a stop comes in between; it is then made up for by a resume."""
        job = self.job
        faults.here("evaluate")
        assert job.evaluation is not None
        beat = functools.partial(job.heart.beat, heartbeat.EVALUATING, self.done)
        with self.account.spent("evaluation"):
            evaluated = evaluate(
                job.task, job.strategy.module, job.evaluation, job.world, job.precision, self._stream,
                lambda: job.stop.asked, beat, job.sharing,
                job.report.evaluated_samples,
            )  # fmt: skip
        if evaluated is None:
            self.is_stopping = True
            self.save()
        else:
            figures, samples = evaluated
            job.evaluated = self.done
            if job.world.is_lead:
                job.report.evaluation(self.done, job.plan.epoch_of(self.done), samples, figures)
        self._meter.restart()

    def save(self) -> None:
        """Commit a checkpoint of this step, or begin to, unless there is one.

        Raises:
            TrainingFailed: the weights are not finite, or this was the last chance to save.
        """
        if self.done == self._saved:
            return
        self.read_votes(everything=True)
        with self.account.spent("checkpoints"):
            if self._commit(is_last=self.is_stopping or self.done == self.job.total_steps):
                self._saved = self.done
        self._clock.restart()

    def finish_saving(self) -> None:
        """Wait for what is being written; where it failed and nothing comes after it, write it again."""
        with self.account.spent("checkpoints"):
            if not self._wait_for_save() and self.is_stopping:  # it was under way when the stop came
                self._commit(is_last=True)

    def _commit(self, is_last: bool) -> bool:
        """Whether the checkpoint is there now, or on its way."""
        job, done = self.job, self.done
        name = job.strategy.not_finite()
        if name:
            raise TrainingFailed(f"{name} is not finite after step {done}; the checkpoint before it is kept")
        scaler = job.precision.scaler
        facts = {
            "epoch": job.plan.epoch_of(done),
            "world_size": job.world.size,
            "samples": job.plan.length,
            "config": configuration.to_flat(job.config),
            "task_sha256": job.task.sha256,
            "torch": torch.__version__,
            "scaler": scaler.state_dict() if scaler is not None else None,
        }
        job.heart.beat(heartbeat.SAVING, done)
        self._wait_for_save()
        try:
            # a checkpoint must find the lines of all steps before it on the disk
            problem = job.report.sync()
            if job.world.any(bool(problem)):
                raise CannotSave(f"metrics and sample logs cannot be written: {problem or 'see the other ranks'}")
            job.saver.save(done, job.strategy.module, job.optimizer, facts)
            if is_last:
                job.saver.wait()
        except CannotSave as error:
            if is_last:
                raise TrainingFailed(f"the checkpoint of step {done} could not be saved: {error}") from error
            self._warn_unsaved(error)
            return False
        return True

    def _wait_for_save(self) -> bool:
        """Wait for the checkpoint that is being written in the background. Whether all is well."""
        try:
            self.job.saver.wait()
        except CannotSave as error:
            self._warn_unsaved(error)
            return False
        return True

    def _warn_unsaved(self, error: CannotSave) -> None:
        self.job.report.say(f"warning: a checkpoint could not be saved ({error}); training goes on and tries again")

"""The training loop. Reads top to bottom like its description in docs/how-it-works.md."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch

from .. import config as configuration
from .. import faults
from ..build.freeze import set_training
from ..build.optimizer import evaluated_weights
from ..build.schedule import Planned, Rates
from ..build.updates import parts_kept
from ..checkpoint.commit import CannotSave
from ..checkpoint.digests import Whole
from ..errors import TrainingFailed
from ..parallel import gather
from ..run import heartbeat
from ..run.metrics import Training, skipped_steps
from ..run.record import Times
from ..signals import RUNG
from . import early_stopping
from .evaluate import evaluate
from .flops import flops_of
from .history import History
from .intervals import SaveClock
from .loggers.loggers import SKIPPED
from .losses import Losses
from .model_check import STEPS as CHECKED_STEPS
from .model_check import ModelCheck
from .not_finite import note_skipped, why_it_ends
from .prefetch import DataWait, Prefetch, micro_batches
from .setup import Job
from .step import note_not_exact, step
from .step_stats import COPY, COUNT, COUNTED, SAVE, STOP, Readback, StepStats
from .timing import Timing, WaitAdvice
from .trace import Trace, steps_of

_NOTHING = contextlib.nullcontext()
_EMPTY_STEPS = 10
"""Number of steps in a row without a readable sample after which a run fails."""


@dataclass
class Done:
    """How the loop ended: after which step, and whether because of a stop request."""

    step: int
    stopped: bool
    reason: str
    """Why the loop ended before its last step without a stop request; '' if it did not."""
    times: Times
    """Where the time of the attempt went, on this rank."""


def train(job: Job) -> Done:
    """Train from where the attempt continues to the end, or to a polite stop. Reports count steps from 1.

    Raises:
        TrainingFailed: the loss is not finite, or the last checkpoint cannot be saved.
    """
    loop, intervals, start = Loop(job), job.intervals, job.start
    with gather.among(job.world, job.config):
        set_training(job.strategy.module, job.config.freeze)
        with loop.timing.spent("start"):
            for update in job.updates:
                update.activate()
                update.strategy.start()
        try:
            if intervals.misses_save(start.saved, start.step):  # a death came before: the state is from memory
                loop.save()
            if loop.misses_evaluation:  # a death or a stop came before
                loop.evaluate()
            while loop.done < intervals.total_steps and not (loop.is_stopping or loop.early_reason or loop.is_at_rung):
                loop.step()
                saves, evaluates = intervals.saves(loop.done), intervals.evaluates(loop.done)
                saves |= loop.read_stats(everything=saves or evaluates)
                saves |= loop.follow_proof()  # what a snapshot continues from has its digest
                job.snapshots.after_step(loop.done)
                if saves or loop.is_stopping or loop.is_at_rung:
                    loop.save()
                if evaluates and not loop.is_stopping:
                    loop.evaluate()
            loop.trace.after(loop.done, is_last=True)
            if loop.is_at_rung:
                loop.rest()
            if loop.early_reason:
                loop.save()
            loop.finish_saving()
        except TrainingFailed:
            # every rank fails at this step; the checkpoint before it may still be on its way to the disk
            with contextlib.suppress(Exception):
                job.saver.wait()
            job.loggers.times(loop.times())
            raise
        finally:
            gc.unfreeze()
    return Done(loop.done, loop.is_stopping and not loop.is_complete, loop.early_reason, loop.times())


class _Step(NamedTuple):
    number: int
    rate: float
    samples: int
    is_skipped: bool


class Loop:
    """The state of training, and the actions of the loop."""

    def __init__(self, job: Job) -> None:
        start = job.start
        self.job, self.done, self.is_stopping = job, start.step, False
        self._history = History(job.run, job.world, job.task, job.config)
        device = job.world.device
        wait = DataWait(device)
        advice = WaitAdvice(job.run.name, job.config.data.workers or 0, job.world.local_size)
        self.timing = Timing(wait, advice, device)
        micros = micro_batches(
            job.intervals, job.data.plan, job.data.evaluations, job.sharing, done=start.step,
            evaluated=self._history.last,
        )  # fmt: skip
        self._prefetch = Prefetch(job.data.loader, micros, wait)
        self._check = ModelCheck(
            job.strategy.module, job.generators, job.find_generators,
            world=None if job.strategy.is_ordered else job.world,
        )  # fmt: skip
        first = next(update for update in job.updates if update.every == 1)  # it asks for copies, in every step
        self._leaves_out = job.config.data.leaves_out
        parts, kept = job.world.on_first(lambda: job.run.read().get("loss_parts", {})), job.state.extra.losses
        self._stats = {
            update.name: StepStats(
                update.strategy.stats_dtype, device, is_ordered=update.strategy.is_ordered,
                leaves_out=self._leaves_out, stop=job.stop, kept=kept.get(update.name),
                kept_parts=kept.get(parts_kept(update.name)), what=update.what, parts=parts.get(update.name),
                parts_fixed=functools.partial(self._note_parts, update.name),
                save=lambda: job.world.is_first and self._save_clock.is_due(),
                copy=job.snapshots.copy_request if update is first else lambda: 0.0,
            )
            for update in job.updates
        }  # fmt: skip
        self.readback = Readback[_Step](device)
        self._saved = start.saved
        self._losses = Losses(
            job.updates, self._stats, plan=job.data.plan, leaves_out=self._leaves_out, kept=kept, done=self.done
        )
        planned = Planned(job.config, job.data.plan.steps_per_epoch, job.total_steps)
        self._rates = Rates(job.task, planned, optimizer=job.optimizer, history=self._history.lines)
        from_memory = start.saved < start.step  # deaths must not put off what the disk is to have
        since = job.run.since_saved(start.saved) if from_memory else 0.0
        self._save_clock = SaveClock(job.config.checkpoint.every_minutes, since)
        self._empty = 0
        """Number of steps in a row without a readable sample."""
        skips = job.config.on_nan == "skip"
        self._skipped = job.world.on_first(lambda: skipped_steps(job.run)) if skips else []
        self._flops = flops_of(job.config, job.world)
        traced = steps_of(job.config.trace if job.world.is_first else "")
        self.trace = Trace(job.run, traced, device.type == "cuda", job.loggers.say)
        self._has_evaluated = False
        self.early_reason = self._ends_early()
        """Why the evaluations so far end the run before its last step; '' if they do not."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do."""
        return self.done >= self.job.total_steps and not self.misses_evaluation

    @property
    def misses_evaluation(self) -> bool:
        """Whether the evaluation after the present step is due and not on record."""
        return self._history.last < self.done and self.job.intervals.evaluates(self.done)

    @property
    def is_last(self) -> bool:
        """Whether no step of this attempt follows the present one."""
        return self.is_stopping or self.is_at_rung or self.done == self.job.total_steps or bool(self.early_reason)

    @property
    def is_at_rung(self) -> bool:
        """Whether the run waits here for what its sweep decides."""
        return 0 < self.job.rung <= self.done < self.job.total_steps

    def rest(self) -> None:
        """Save and stop at a rung, unless the evaluations end the run, or another stop came before."""
        if not (self.is_stopping or self.early_reason):
            self.save()
            self.is_stopping = True
            self.job.stop.ask(RUNG, f"where its sweep compares trials, after {self.job.rung} steps")

    def _ends_early(self) -> str:
        is_end = self.done >= self.job.total_steps
        return "" if is_end else early_stopping.reason(self.job.config.early_stopping, self._history.lines)

    def _order(self) -> None:
        """Make the orders of the next steps known, where the task gives them."""
        for reason in self.job.data.orders.ready(self.done) if self.job.data.orders is not None else ():
            note_not_exact(self.job, reason)

    def step(self) -> None:
        """Make the next step."""
        job = self.job
        self._order()
        rate = self._rates.set_for(self.done)
        made = self.done - job.start.step  # in this attempt
        self._check.is_on = made < CHECKED_STEPS
        samples = job.data.plan.samples(self.done)
        self.trace.before(self.done + 1)
        flops = self._flops if not made else None
        with flops.counting(job.data.plan, job.sharing, self.done) if flops is not None else _NOTHING:
            faults.here("step")
            result = step(job, self.done, self._prefetch, self._stats, self._check)
        self.timing.step(samples)
        if not self.done and not self._leaves_out:  # else this rank may have had no sample
            job.compiling.check(job.config)
        self.done += 1
        self.trace.after(self.done)
        if job.hooks.are_used and len(result.left_out) < len(result.sums):
            job.hooks.after_step(self.done)
        job.heart.beat(heartbeat.TRAINING, self.done)
        job.saver.prepare(job.state)
        self.readback.put(_Step(self.done, rate, samples, bool(result.left_out)), result)
        if made + 1 == CHECKED_STEPS:  # what is alive now lasts: do not search it for garbage again
            gc.collect()
            gc.freeze()

    def follow_proof(self) -> bool:
        """Do what `train prove` asks for after a step, on all ranks alike. Returns whether a checkpoint is due."""
        digests, job = self.job.digests, self.job
        if digests is None:
            return False
        digests.after(self.done, lambda: {name: one for name, one in job.state.take_apart(Whole()).items() if one})
        if self.done < job.total_steps and digests.stops(self.done, job.stop):
            self.is_stopping = True
        return digests.saves(self.done)

    def read_stats(self, everything: bool) -> bool:
        """Read the stats of the steps that can be read by now. Returns whether a rank asks for a checkpoint in them.

        Args:
            everything: also wait for the stats of the last step.
        """
        save = False
        for made, updates, figures in self.readback.take(everything):
            self._log(made, updates, figures)
            requests = 0.0
            for sums in updates.values():
                requests += sums[COPY]
                self.is_stopping |= sums[STOP] > 0
                save |= sums[SAVE] > 0
            self.job.snapshots.stats_read(made.number, requests)
        return save

    def _log(self, made: _Step, updates: dict[str, list[float]], figures: dict[str, float]) -> None:
        """Check the losses of a step and write its line."""
        job, last = self.job, [*updates.values()][-1]
        losses, parts = self._losses.of_step(updates, made.samples)
        if made.is_skipped:
            note_skipped(job, self._skipped, made.number)
        elif not math.isfinite(sum(losses.values())):
            raise TrainingFailed(why_it_ends(losses, made.number))
        if last[COUNTED]:
            self.timing.count(last[COUNT])
        self._empty = 0 if last[COUNT] or not self._leaves_out else self._empty + 1
        if self._empty == _EMPTY_STEPS or (self._empty and made.number == self._empty == job.total_steps):
            raise TrainingFailed(
                f"no sample could be read in {self._empty} steps in a row, up to step {made.number}; see "
                f"{SKIPPED} in the run folder"
            )
        if job.world.is_lead and (job.intervals.logs(made.number) or made.is_skipped):
            self._write_line(made, *self._losses.of_line(losses, parts), figures)

    def _note_parts(self, update: str, names: Sequence[str]) -> None:
        """Record the names of the parts of a loss, which all attempts keep to."""
        if names and self.job.world.is_lead:
            self.job.run.note(lambda record: record.setdefault("loss_parts", {}).update({update: [*names]}))

    def _write_line(
        self, made: _Step, losses: dict[str, float], parts: dict[str, float], figures: dict[str, float]
    ) -> None:
        job = self.job
        line = cast(Training, {
            "step": made.number, "epoch": job.data.plan.epoch_of(made.number), "loss": sum(losses.values()),
            "lr": made.rate, **self.timing.speed(), **losses, **parts, **figures,
        })  # fmt: skip
        if made.is_skipped:
            line["skipped"] = True
        if self._flops is not None:
            line["mfu"] = self._flops.utilisation(line["samples_per_s"])
        job.loggers.training(line, self.times)
        advice = self.timing.advice.text(made.number == job.total_steps)
        if advice:
            job.loggers.say(f"warning: {advice}")
            job.run.note(data_wait=advice)

    def times(self) -> Times:
        """Return where the time of this attempt has gone so far, on this rank."""
        strategies = [update.strategy for update in self.job.updates]
        measures = all(strategy.measures_communication for strategy in strategies)
        return self.timing.times(
            self.done, sum(strategy.communication.seconds() for strategy in strategies) if measures else None
        )

    def evaluate(self) -> None:
        """Evaluate. A stop request ends the evaluation; a resume then repeats it.

        Before an error in the evaluation ends the run, the state is saved, so that a resume repeats no step.
        """
        agreed = list[bool]()
        is_alone = self.job.world.size == 1
        splits = configuration.strategies.of(self.job.config.parallel.strategy, self.job.world.size).splits_parameters
        together = not splits  # else a rank with an error would be missed in the others' forward
        if not (is_alone or together or self._has_evaluated):  # no rank could save after another one's error
            self.save()
            self.finish_saving()
        try:
            self._evaluate((lambda: agreed.append(True)) if together else None)
        except (Exception, SystemExit) as error:
            if agreed or is_alone or (together and isinstance(error, TrainingFailed)):  # every rank comes here
                with contextlib.suppress(Exception):
                    self.save()
                    self.finish_saving()
            raise
        self._has_evaluated = True

    def _evaluate(self, failed: Callable[[], None] | None) -> None:
        job = self.job
        faults.here("evaluate")
        self._order()  # the next steps are fetched meanwhile
        job.snapshots.hold()  # averaged weights take the place of the others meanwhile
        beat = functools.partial(job.heart.beat, step=self.done)
        unchanged = job.hooks.extra.unchanged(job.world.device)  # a resume does not repeat an evaluation
        with (
            self.timing.spent("evaluation"),
            gather.evaluating(job.world.size),
            evaluated_weights(job.optimizer),
            unchanged,
        ):
            evaluated = evaluate(
                job.task, job.strategy.module, job.data.evaluations, stream=self._prefetch.batches,
                world=job.world, sharing=job.sharing, precision=job.precision, average=job.hooks.average, beat=beat,
                stop=lambda: job.stop.asked, show=functools.partial(job.loggers.media, self.done), failed=failed,
            )  # fmt: skip
        if evaluated is None:
            self.is_stopping = True
            self.save()
        else:
            figures, samples = evaluated
            epoch = job.data.plan.epoch_of(self.done)
            if job.world.is_lead:
                job.loggers.evaluation(self.done, epoch, samples, figures)
            self._history.add({"step": self.done, "epoch": epoch, "samples": samples, "eval": {**figures}})
            self._rates.follow(self._history.lines)
            self.early_reason = self._ends_early()
        self.timing.restart()

    def save(self) -> None:
        """Save a checkpoint of this step, in the background if asked for, unless there is one.

        Raises:
            TrainingFailed: the weights are not finite, or this was the last chance to save.
        """
        if self.done == self._saved:
            return
        self.read_stats(everything=True)
        with self.timing.spent("checkpoints"):
            if self._commit(is_last=self.is_last):
                self._saved = self.done
        self._save_clock.restart()

    def finish_saving(self) -> None:
        """Wait for the checkpoint that is being written. If it failed and none follows, write it again."""
        with self.timing.spent("checkpoints"):
            if not self._wait_for_save() and self.is_last:  # it was under way when the end came
                self._commit(is_last=True)

    def _commit(self, is_last: bool) -> bool:
        """Write the checkpoint, or start to. Returns whether it is written or being written."""
        job, done = self.job, self.done
        for update in job.updates:
            update.activate()
            name = update.strategy.not_finite()
            if name:
                raise TrainingFailed(f"{name} is not finite after step {done}; the checkpoint before it is kept")
        job.hooks.check()
        scaler = job.precision.scaler
        facts = {
            "epoch": job.data.plan.epoch_of(done),
            "world_size": job.world.size,
            "samples": job.data.plan.length,
            "config": configuration.to_flat(job.config),
            "task_sha256": job.task.sha256,
            "torch": torch.__version__,
            "scaler": scaler.state_dict() if scaler is not None else None,
        }
        job.heart.beat(heartbeat.SAVING, done)
        self._wait_for_save()
        try:
            # a checkpoint must find the lines of all steps before it on the disk
            problem = job.loggers.sync()
            if job.world.any(bool(problem)):
                raise CannotSave(f"metrics and sample logs cannot be written: {problem or 'see the other ranks'}")
            job.saver.save(done, job.state, facts)
            if is_last:
                job.saver.wait()
        except CannotSave as error:
            if is_last and (older := job.saver.make_room(error)):
                job.loggers.say(f"warning: {error}; the checkpoint of step {older} was removed for that of step {done}")
                return self._commit(is_last)
            if is_last:
                raise TrainingFailed(f"the checkpoint of step {done} could not be saved: {error}") from error
            self._warn_unsaved(error)
            return False
        return True

    def _wait_for_save(self) -> bool:
        """Wait for the checkpoint that is being written in the background. Returns whether it could be written."""
        try:
            self.job.saver.wait()
        except CannotSave as error:
            self._warn_unsaved(error)
            return False
        return True

    def _warn_unsaved(self, error: CannotSave) -> None:
        self.job.loggers.say(f"warning: a checkpoint could not be saved ({error}); training continues and tries again")

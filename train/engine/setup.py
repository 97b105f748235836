"""From a run folder to everything that a rank trains with."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from typing import Any

import torch

from train import faults
from train.checkpoint.saver import Saver
from train.checkpoint.state import load
from train.config import Config
from train.data.loader import Loader
from train.data.plan import Plan
from train.data.sharing import Sharing
from train.engine import build, opened, uneven
from train.engine.agenda import Agenda, agenda_of
from train.engine.report import Report
from train.engine.skipped import Skipped
from train.engine.spare import Spare
from train.parallel import choose
from train.parallel.precision import Precision
from train.parallel.seat import Seat
from train.parallel.strategy import Strategy
from train.parallel.units import recompute
from train.parallel.world import World, join, take_device
from train.record import manifest as manifests
from train.record import metrics, store
from train.record.heartbeat import Heart
from train.record.store import Run
from train.signals import StopRequest
from train.tasks import Task

log = logging.getLogger("train")


@dataclasses.dataclass
class Job:
    """Everything a rank trains with."""

    run: Run
    task: Task
    config: Config
    world: World
    precision: Precision
    strategy: Strategy
    optimizer: torch.optim.Optimizer
    loader: Loader
    plan: Plan
    evaluation: Plan | None
    """The same of the evaluation set, if there is one."""
    agenda: Agenda
    saver: Saver
    report: Report
    stop: StopRequest
    heart: Heart
    evaluated: int
    """Last step after which an evaluation is on record; -1 without one."""
    spare: Spare | None = None
    """Where a rank without data has to compute all the same."""

    @property
    def sharing(self) -> Sharing:
        """Which micro batches are this rank's."""
        return Sharing(self.world.rank, self.world.size, self.strategy.is_ordered, self.strategy.lends_data)

    @property
    def total_steps(self) -> int:
        return self.agenda.total_steps

    @property
    def leaves_out(self) -> bool:
        """Whether samples that cannot be read are left out, so that the true counts are known after a step only."""
        return self.config.data.on_error == "skip"


@dataclasses.dataclass
class Done:
    """How the loop ended: at which step, and whether because somebody asked for a stop."""

    step: int
    stopped: bool


def set_up(
    run: Run, seat: Seat, attempt: int, stop: StopRequest, bar: bool, heart: Heart, held: contextlib.ExitStack
) -> tuple[Job, int]:
    """Everything to train with, and the step to continue after. What must be closed at the end goes to `held`."""
    task = opened.task_of(run)
    config = opened.config_of(run, task)
    _fix_arithmetic(config)
    device = take_device(config, seat.local_size, seat.local_rank)
    precision = Precision(config.precision, device)

    train_set, eval_set = build.make_datasets(task, config)
    plan = build.plan_of(config, len(train_set))
    # before the others are met: their connections have threads, and the loader forks
    skipped = Skipped(run) if config.data.on_error == "skip" else None
    loader = Loader(
        train_set, eval_set, task.collate, config.data.workers, device, precision.inputs, skipped, config.channels_last
    )
    held.callback(loader.close)
    world = join(config, seat.rank, seat.size, seat.local_rank, seat.local_size, device, seat.init)
    total = build.total_steps(config, plan)
    model = _model(run, task, config, precision, world)
    strategy = choose.make(world, config, precision)
    model = strategy.place(model)
    optimizer = build.make_optimizer(task, model, config)
    faults.here("start")
    step, manifest = world.on_first(lambda: _begin(run))
    if manifest:
        _load(run, step, manifest, model, optimizer, precision)
    faults.here("loaded")
    if config.compile:
        # one graph a shape: torch would make one for any shape once it has seen two, and a resume may see others first
        model.compile(dynamic=False)
    evaluation = world.on_first(lambda: metrics.last_evaluation(run))
    told = Report(run, world, config, total, step, bar and world.is_first)
    held.callback(told.close)

    def saved(at: int) -> None:
        told.say(f"saved {run.checkpoint(at).name}")
        run.note(saved_step=at)

    job = Job(
        run, task, config, world, precision, strategy, optimizer, loader,
        plan, None if eval_set is None else build.evaluation_plan(config, len(eval_set)),
        agenda_of(config, plan, total, eval_set is not None),
        Saver(run, world, config, attempt, saved),
        told, stop, heart,
        evaluation["step"] if evaluation else -1,
        Spare(world, config.data.on_error == "skip") if strategy.lends_data else None,
    )  # fmt: skip
    if world.is_first:
        _announce(job, attempt, step)
    return job, step


def _fix_arithmetic(config: Config) -> None:
    """What makes two processes compute the same bits."""
    assert config.cpu_threads is not None
    torch.set_num_threads(config.cpu_threads)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False


def _model(run: Run, task: Task, config: Config, precision: Precision, world: World) -> torch.nn.Module:
    """The model with the weights that the run began with, on the CPU."""
    model = build.make_model(task, config, precision.weights)
    if (run.folder / "init.safetensors").exists():
        build.set_weights(model, build.read_weights(run.folder / "init.safetensors"), "init.safetensors")
    if config.sync_batchnorm and world.size > 1:
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if config.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    recompute(model, config.parallel.recompute)
    return model


def _load(
    run: Run, step: int, manifest: dict[str, Any], model: torch.nn.Module, optimizer: torch.optim.Optimizer,
    precision: Precision,
) -> None:  # fmt: skip
    """Read the checkpoint of a step. A collective."""
    rates = [group["lr"] for group in optimizer.param_groups]
    load(run.checkpoint(step), model, optimizer)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate  # the schedule starts from the configured rates, not from the saved one
    if precision.scaler is not None and manifest.get("scaler"):
        precision.scaler.load_state_dict(manifest["scaler"])


def _announce(job: Job, attempt: int, step: int) -> None:
    """What run.json and the log say at the start of an attempt. On rank 0."""
    run, plan, config, world = job.run, job.plan, job.config, job.world
    assert config.cpu_threads is not None
    # where ranks without data are lent some, none waits
    without = (
        {} if job.strategy.lends_data else uneven.survey(plan, job.evaluation, world.size, job.strategy.is_ordered)
    )
    run.note(
        lambda record: record["attempts"][-1].update(from_step=step, ready=store.now()),
        step=step, epoch=plan.epoch_of(step), total_steps=job.total_steps, samples=plan.length,
        steps_per_epoch=plan.steps_per_epoch, device=str(world.device.type), data_wait="", without_data=without,
    )  # fmt: skip
    per_rank = f"{config.batch_size} = up to {plan.micro_batches(0)} x {config.micro_batch_size}"
    spread = choose.resolve(config, world.size)
    job.report.say(
        f"{run.name}: {plan.length} samples, {job.total_steps} steps, global batch {per_rank}, "
        f"{world.size} rank{'s' if world.size > 1 else ''} on {world.device.type}, {config.precision}"
        + (f", {spread}" if spread not in ("single", "ddp") else "")
        + (f", continuing after step {step}" if step else "")
    )
    reason = run.read().get("cpu_threads_reason")
    if attempt == 1 and reason:
        job.report.say(f"{config.cpu_threads} CPU thread{'s' if config.cpu_threads > 1 else ''} a rank ({reason})")
    if without:
        job.report.say(uneven.sentence(without))


def _begin(run: Run) -> tuple[int, dict[str, Any]]:
    """On rank 0: clear away what a kill left, choose the checkpoint to continue from, cut the records to it."""
    manifests.clean(run)
    found = manifests.newest_valid(run)
    step, manifest, unused = found or (0, {}, [])
    for newer, line in zip(run.steps_saved(), unused, strict=False):  # the newest ones, in the same order
        log.warning("warning: %s", line)
        manifests.set_aside(run, newer, line.prefix)
    metrics.cut(run, step)
    return step, manifest

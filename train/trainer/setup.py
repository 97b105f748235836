"""Sets a rank up: from a run folder to everything that it trains with."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import uuid
from collections.abc import Callable

import torch

from .. import config as configuration
from .. import faults
from ..build import cores, determinism, initial_weights, objects, sampling
from ..build.first_weights import mender
from ..build.freeze import frozen_names
from ..build.hooks import Hooks
from ..build.updates import Update, losses_kept, spread_updates
from ..checkpoint.buffers import Buffers
from ..checkpoint.digests import Digests
from ..checkpoint.newest import ResumeState
from ..checkpoint.save import Saver
from ..checkpoint.snapshot import Parts, Snapshots
from ..checkpoint.state_dict import TrainState
from ..code import changes
from ..config import Config, strategies
from ..data.loader import Loader
from ..data.plan import Plan, Sharing
from ..data.progress import set_total
from ..data.seeding import Seed, owned
from ..errors import TrainingFailed
from ..parallel import choose
from ..parallel.compiling import Compiling, compile_as_asked
from ..parallel.devices import pick_device, take_device
from ..parallel.precision import Precision
from ..parallel.rank_env import RankEnv
from ..parallel.strategy import Strategy
from ..parallel.torch_private import fix_compiler, limit_compile_threads
from ..parallel.world import World, join
from ..parallel.wrap_units import recompute
from ..run import folders, heartbeat, metrics, proving
from ..run.heartbeat import Heart
from ..run.run_folder import Run
from ..run.spec import Spec
from ..signals import StopRequest
from ..tasks import Task
from .intervals import Intervals
from .load import load_newest
from .loggers.loggers import Loggers, Skipped
from .orders import Orders, new_digests

log = logging.getLogger("train")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """What a rank trains and evaluates on."""

    loader: Loader
    size: int
    """Number of samples of the training set."""
    plan: Plan
    """How the training set is cut into batches."""
    evaluations: dict[str, Plan]
    """The plans of the evaluation sets by name; '' is the name of a set without one."""
    orders: Orders | None = None
    """The task's own order of the samples; None: it has none."""


@dataclasses.dataclass(kw_only=True)
class Job:
    """Everything that a rank trains with."""

    run: Run
    task: Task
    config: Config
    world: World
    precision: Precision
    updates: list[Update]
    """The updates of a step, in their order; most tasks have one."""
    state: TrainState
    hooks: Hooks
    data: Data
    intervals: Intervals
    saver: Saver
    snapshots: Snapshots
    loggers: Loggers
    stop: StopRequest
    heart: Heart
    compiling: Compiling
    start: ResumeState
    """The state that the attempt continues from."""
    rung: int = 0
    """The step after which the run stops, so that its sweep can compare it; 0: none."""
    digests: Digests | None = None
    """Digests of the state after each step, in a run of `train prove`."""

    @property
    def total_steps(self) -> int:
        return self.intervals.total_steps

    @property
    def strategy(self) -> Strategy:
        """How the model is spread; with several updates, the strategy of the first one."""
        return self.updates[0].strategy

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.state.optimizer

    @functools.cached_property
    def sharing(self) -> Sharing:
        """Which micro batches are this rank's."""
        return Sharing(self.world.rank, self.world.size, self.strategy.is_ordered)

    @functools.cached_property
    def generators(self) -> list[Seed]:
        """Random generators of the task that a training loss may draw from; see data/seeding.py."""
        return self.find_generators()

    def find_generators(self) -> list[Seed]:
        """Find these generators again."""
        # a loss may be a partial or a method, which does not say what file it is of
        losses = [update.loss for update in self.updates]
        return owned(self.strategy.module, *losses, self.task.updates or self.task.loss)

    @functools.cached_property
    def optimizer_generators(self) -> list[Seed] | None:
        """Random generators that the task's optimizer may draw from; None: the optimizer is torch's, which draws
        nothing."""
        is_torchs = type(self.optimizer).__module__.startswith("torch.")
        return None if is_torchs else owned(self.optimizer)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory outside the ranks that this one may copy its state to."""

    address: str
    """The address of the buffers: see checkpoint/buffers.py."""
    left: Callable[[], int]
    """Returns the bytes of memory that are left."""


def set_up(
    run: Run, spec: Spec, rank_env: RankEnv, *, attempt: int, stop: StopRequest, bar: bool, heart: Heart,
    held: contextlib.ExitStack, memory: Memory | None = None,
) -> Job:  # fmt: skip
    """Return everything to train with. What must be closed at the end is added to `held`."""
    asked = proving.take()
    task = objects.task_of(run, spec)
    config = objects.config_of(run, task)
    determinism.set_determinism(config)
    limit_compile_threads(cores.per_rank(rank_env.local_size))
    device = pick_device(config, rank_env.local_size, rank_env.local_rank)
    choose.check(config, rank_env.size)  # with several machines their sum was not known before
    precision = Precision(config.precision, device)
    data = _data(run, spec, task, config, precision)
    held.callback(data.loader.close)
    take_device(device)  # not before the loader has forked: a process that has touched a GPU cannot pass it on
    world = join(config, rank_env, device)
    sees_home = world.nodes == 1 or strategies.of(config.parallel.strategy).needs_shared_disk
    home = _home_of(run, world, sees_home)
    is_begun = bool(home.newest_checkpoint)
    model = _model(run, spec, task=task, config=config, precision=precision, world=world, is_begun=is_begun)
    is_sharded = strategies.of(config.parallel.strategy, world.size).is_sharded
    frozen = set[str]() if is_sharded else frozen_names(model, config.freeze)
    updates, optimizer = spread_updates(task, model, config=config, world=world, precision=precision)
    model = updates[0].strategy.module
    faults.here("start")
    mark, number = world.broadcast((uuid.uuid4().hex, attempt))  # node 0's: each node counts its own attempts
    snapshots = _snapshots(task, config, world, memory, mark)
    hooks = Hooks(task, updates[0].strategy, config)
    orders = {"digests": new_digests(device)} if task.sampler else {}
    extra = dataclasses.replace(hooks.extra, losses=losses_kept(updates, device), orders=orders)
    state = TrainState(module=model, optimizer=optimizer, precision=precision, extra=extra)
    start = load_newest(
        run, home, world, snapshots, state, lambda: heart.beat(heartbeat.STARTING, heart.step), sees_home=sees_home,
        mend=mender(home, task, config),
    )  # fmt: skip
    if not start.step and (is_begun or spec.fork_step):
        _check_beginning(run, spec)
    faults.here("loaded")
    fix_compiler(bool(config.compile), config.deterministic)
    compiling = Compiling(heart)
    held.callback(compiling.close)
    intervals = Intervals.of(config, data.plan, objects.total_steps(config, data.plan), bool(data.evaluations))
    if task.sampler:
        data = _ordered(
            data, task, config, world=world, heart=heart, total_steps=intervals.total_steps,
            digests=orders["digests"], compares=start.step != spec.fork_step,
        )  # fmt: skip
    loggers = Loggers(
        run, unused=spec.unused_fields, world=world, config=config, total_steps=intervals.total_steps,
        done=start.step, bar=bar and world.is_first,
    )  # fmt: skip
    held.callback(loggers.close)

    def saved(step: int) -> None:
        loggers.say(f"saved {run.checkpoint(step).name}")
        run.note(saved_step=step)

    saver = Saver(home, world, config=config, attempt=number, saved=saved, all_write=sees_home, frozen=frozen)
    held.callback(saver.close)
    snapshots.attach(state, loggers.is_written, loggers.say)
    held.callback(snapshots.close)
    job = Job(
        run=run, task=task, config=config, world=world, precision=precision, data=data, updates=updates, state=state,
        hooks=hooks, compiling=compiling, intervals=intervals, start=start, saver=saver, snapshots=snapshots,
        loggers=loggers, stop=stop, heart=heart, rung=spec.rung,
        digests=Digests(asked, run, rank=rank_env.rank, attempt=attempt) if asked is not None else None,
    )  # fmt: skip
    if world.is_lead:
        _announce(job, spec, attempt, mark)
    return job


def _check_beginning(run: Run, spec: Spec) -> None:
    """Refuse to start from step 0 without the weights that the run started with. Raises TrainingFailed."""
    if spec.fork_step:
        fork = spec.forked_from or {}
        raise TrainingFailed(
            f"no checkpoint of {run.name} is whole, and a fork cannot start without one; fork again: train "
            f"fork {fork['run']} --checkpoint {fork['step']}"
        )
    if (run.folder / initial_weights.FILE).exists():
        raise TrainingFailed(
            f"no checkpoint of {run.name} is whole; to start again with its initial weights: train resume {run.name}"
        )


def _home_of(run: Run, world: World, sees_home: bool) -> Run:
    """Return the run whose folder has the checkpoints: node 0's. A rank that does not see it gets its own run."""
    is_of_node_0 = world.rank == world.local_rank  # ranks are numbered node by node
    return Run(folders.of_node_0(run.path)) if sees_home and not is_of_node_0 else run


def _data(run: Run, spec: Spec, task: Task, config: Config, precision: Precision) -> Data:
    """Make the loader and the plans of the datasets. Call it before ranks connect: connecting starts threads, and the
    loader forks."""
    train_set, eval_sets = objects.make_datasets(task, config)
    plan = objects.plan_of(config, sampling.samples_of(spec, train_set))
    set_total(objects.total_steps(config, plan))
    loader = objects.make_loader(
        task, config=config, precision=precision, train_set=train_set, eval_sets=eval_sets,
        workers=config.data.workers or 0, left_out=Skipped(run),
    )  # fmt: skip
    return Data(loader=loader, size=len(train_set), plan=plan, evaluations=objects.evaluation_plans(config, eval_sets))


def _ordered(
    data: Data, task: Task, config: Config, *, world: World, heart: Heart, total_steps: int, digests: torch.Tensor,
    compares: bool,
) -> Data:  # fmt: skip
    """Return the data in the order that the task's own function gives."""
    orders = Orders(
        sampling.orders(task, config, data.size), name=f"{task.sampler} in {task.file}", plan=data.plan, world=world,
        heart=heart, ahead=data.loader.ahead, total_steps=total_steps, digests=digests, compares=compares,
    )  # fmt: skip
    return dataclasses.replace(data, plan=dataclasses.replace(data.plan, order=orders.of), orders=orders)


def _model(
    run: Run, spec: Spec, *, task: Task, config: Config, precision: Precision, world: World, is_begun: bool
) -> torch.nn.Module:
    """Make the model on the CPU, with the weights that the run starts with, unless a checkpoint will replace them."""
    model = objects.make_model(task, config, precision.weights)
    if not is_begun and (spec.init or (run.folder / initial_weights.FILE).exists()):
        initial_weights.load(run.folder, model)
    return arrange(model, config, ranks=world.size, compiles=True)


def arrange(model: torch.nn.Module, config: Config, *, ranks: int, compiles: bool) -> torch.nn.Module:
    """Return the model as this many ranks compute with it, before it is spread over them."""
    if config.sync_batchnorm and ranks > 1:
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if not strategies.of(config.parallel.strategy, ranks).splits_parameters:  # parts have no layout; inputs have it
        determinism.lay_out(model, config)
    if compiles:
        compile_as_asked(model, config)
    recompute(model, config.parallel.recompute)
    return model


def _snapshots(task: Task, config: Config, world: World, memory: Memory | None, mark: str) -> Snapshots:
    """Make the snapshots. A collective: if one rank has no memory for them, no rank has snapshots."""
    is_sharded = strategies.of(config.parallel.strategy).is_sharded
    # to other machines rank 0 sends its state; ranks are numbered node by node
    needs_them = is_sharded or world.rank == world.local_rank
    parts = None
    if memory is not None and config.checkpoint.snapshots and needs_them:
        places = [world.local_rank] if is_sharded else range(world.local_size)
        try:
            buffers = [Buffers(memory.address, place) for place in places]
            parts = Parts(buffers, 0 if is_sharded else world.local_rank)
        except OSError as error:
            log.warning("warning: no snapshots in memory: %s", error)
    has_all = not world.any(needs_them and parts is None)
    same = {key: value for key, value in configuration.to_flat(config).items() if key not in configuration.LOCAL}
    place = (world.rank, world.size) if is_sharded else ()
    fingerprint = json.dumps([same, task.sha256, place], sort_keys=True, default=str)
    return Snapshots(
        parts if has_all else None, is_on=has_all, world=world, fingerprint=fingerprint, mark=mark,
        memory_left=memory.left if memory is not None else lambda: 0,
    )  # fmt: skip


def _announce(job: Job, spec: Spec, attempt: int, mark: str) -> None:
    """Write what run.json and the log say at the start of an attempt. For the first rank of a machine."""
    start, step = job.start, job.start.step
    run, plan, config, world = job.run, job.data.plan, job.config, job.world
    assert config.cpu_threads is not None
    line = metrics.last_training(run)
    edited = changes.edited(run, spec)
    run.note_ready(
        step, mark, edited, epoch=plan.epoch_of(step), total_steps=job.total_steps, samples=plan.length,
        device=str(world.device.type), data_wait="", loss=line.get("loss") if line is not None else None,
    )  # fmt: skip
    per_rank = f"{config.batch_size} = up to {plan.micro_batches(0)} x {config.micro_batch_size}"
    strategy = strategies.of(config.parallel.strategy, world.size)
    job.loggers.say(
        f"{run.name}: {plan.length} samples, {job.total_steps} steps, global batch {per_rank}, "
        f"{world.size} rank{'s' if world.size > 1 else ''} on {world.device.type}, {config.precision}"
        + (f", {strategy.name}" if strategy != strategies.of(strategies.AUTO, world.size) else "")
        + (f", continuing after step {step}" if step else "")
        + (" as it was in memory" if start.from_memory else "")
    )
    threads = config.cpu_threads
    for warning in (*spec.warnings, *edited):
        job.loggers.say(f"warning: {warning}")
    if attempt > 1:
        return
    for text in spec.init:
        job.loggers.say(text)
    if reason := spec.reasons.get("cpu_threads"):
        job.loggers.say(f"{threads} CPU thread{'s' if threads > 1 else ''} per rank ({reason})")
    if reason := spec.reasons.get("precision"):
        job.loggers.say(reason)
    if reason := spec.reasons.get("micro_batch_size"):
        job.loggers.say(f"micro batches of {config.micro_batch_size} samples ({reason})")

"""Finds everything that can be wrong with a run before anything is created or changed.

`prepare` checks a new run, `prepare_resume` one that continues, both by the list of checks in `check_run`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import cuda

from train import config as configuration
from train import gpus
from train.checkpoint import manifest as manifests
from train.config import Config
from train.config.resolve import check_changes
from train.data import fingerprint
from train.data.fetch import is_indexed_at_once
from train.errors import Refused, nearest
from train.launcher import provenance
from train.launcher.request import ALONE, Request, resolve
from train.launcher.resumable import fork_of
from train.parallel import choose
from train.parallel.devices import NoGPU, check_kernels, pick_device
from train.parallel.precision import ON_GPU_ALONE, Precision
from train.parallel.torch_private import without_compiler
from train.parallel.wrap_units import recompute
from train.run import best, imports
from train.run.metrics import evaluations
from train.run.record import Record
from train.run.run_folder import Run
from train.tasks import Task
from train.trainer import build, cores, initial_weights, schedule, trace
from train.trainer.build import config_of, data_differs, make_objects, task_of
from train.trainer.loggers import wandb
from train.trainer.optimizer import check_fields
from train.trainer.updates import read_updates


@dataclasses.dataclass
class Prepared:
    """A run that has passed every check: what to create its folder with."""

    task: Task
    config: Config
    files: dict[str, str | bytes]
    record: dict[str, Any]
    copies: dict[str, Path] = dataclasses.field(default_factory=dict)
    """What is copied into it from the run that it is a fork of."""


@dataclasses.dataclass
class _Checked:
    """What the checks have found."""

    device: torch.device
    cards: list[gpus.Card]
    """GPUs that this process sees; none on the CPU."""
    train_set: Any
    eval_sets: dict[str, Any]
    model: torch.nn.Module | None
    """None: of a resume that has nothing to ask it."""
    initial: initial_weights.Fitted | None
    """The weights that a new run begins with, where model() does not make them."""
    warnings: list[str]


def prepare(request: Request) -> Prepared:
    """Check a new run from its flags to its data, and choose what its user has left open.

    Raises:
        Refused: it cannot be run as asked for.
    """
    task, config = resolve(request)
    ranks, everywhere = request.ranks, request.ranks * request.nodes[-1]
    chosen = [name for name in ("micro_batch_size", "cpu_threads") if getattr(config, name) in (None, "auto")]
    is_searched = config.micro_batch_size == "auto"
    found = check_run(task, config, ranks, request.nodes, given=request.flags)
    assert found.model is not None
    if config.data.workers is None:
        config.data.workers = cores.default_loaders(
            ranks, found.device, is_indexed_at_once(found.train_set, task.collate)
        )
    micro_reason = threads_reason = ""
    if is_searched:
        from train.launcher import batch_size

        config.micro_batch_size, micro_reason = batch_size.find(request, config)
        check_sync_batchnorm(config, found.device, everywhere, len(found.train_set))
    if config.cpu_threads is None:
        config.cpu_threads, threads_reason = cores.default_threads(ranks, found.device, found.model)
    record = _record(request, task, config, len(found.train_set)) | {
        "world_size": everywhere,
        "chosen": chosen,
        "cpu_threads_reason": threads_reason,
        "micro_batch_size_reason": micro_reason,
        "versions": provenance.versions(found.cards),
        "init": found.initial.table() if found.initial is not None else [],
    }
    return Prepared(task, config, _files(request, task, config, found), record)


def prepare_resume(run: Run, flags: dict[str, str], local: int, nodes: range = ALONE) -> tuple[Config, list[str]]:
    """Check that a run can continue, with these changes; nothing is written. Also returns warnings.

    Args:
        local: ranks on this machine.
        nodes: numbers of machines that it may have.

    Raises:
        Refused: it cannot continue as it stands or as asked for.
    """
    record, task, ranks = run.read(), task_of(run), local * nodes[-1]
    config = config_of(run, task)
    if flags:
        before = configuration.to_flat(config)
        config = configuration.with_flags(flags, task.Settings, task.file, before)
        check_changes(before, configuration.to_flat(config), f"cannot change {run.name}", fork_of(run, flags))
    step, manifest, unused = manifests.newest_valid(run)
    if manifest:
        what = f"{run.folder / 'config.toml'} does not fit its checkpoints"
        check_changes(manifest["config"], configuration.to_flat(config), what)
        if manifest.get("task_sha256") != task.sha256:
            if not task.is_built_in:
                raise Refused(f"{task.file} is not the task that {run.name} was trained with; put the original back")
            unused.append(f"the task {task.name} has changed since; {run.name} goes on with it as it is now")
    found = check_run(task, config, local, nodes, run, flags)
    plan = build.plan_of(config, len(found.train_set))
    total = build.total_steps(config, plan)
    if total < step:
        raise Refused(f"{run.name} has trained {step} steps already, more than the {total} now asked for")
    warnings = [*unused, *found.warnings, *edited(run, record)]
    micros = plan.micro_batches(0)
    if micros < ranks:
        warnings.append(f"{ranks} ranks share {micros} micro batches per step: {ranks - micros} compute nothing new")
    return config, warnings


def check_run(
    task: Task, config: Config, local: int, nodes: range, run: Run | None = None, given: Collection[str] = ()
) -> _Checked:
    """The checks of a run, new or resumed, in their order; its device and micro batch are written into `config`.

    Args:
        local: ranks of each machine.
        nodes: numbers of machines that it may have.
        run: the one that is resumed; None: it is a new one.
        given: fields that its user has typed; a metric that the run has had from before is no reason to refuse it.

    Raises:
        Refused: it cannot be run as asked for.
    """
    ranks, warnings = local * nodes[-1], []
    device = _device(config, local, run)
    config.device = "cuda" if device.type == "cuda" else "cpu"  # a resume must not find another one without a word
    cards = gpus.seen_here() if device.type == "cuda" else []
    check_kernels(cards)
    precision = Precision(config.precision, device)
    check_ranks(config, local, nodes)
    check_fields(task, config, given)
    wandb.check(config.log.wandb)
    if config.early_stopping.metric and not (config.eval.every_epochs or config.eval.every_steps):
        raise Refused("--early_stopping.metric needs evaluations before the end; give --eval.every_epochs")
    if config.on_nan == "skip" and config.precision == "fp16":
        raise Refused("--on_nan skip: the loss scaling of fp16 leaves such steps out by itself; leave out --on_nan")
    if run is None:
        _cut_batch(config, ranks)
    elif not isinstance(config.micro_batch_size, int) or config.cpu_threads is None:
        raise Refused(f"{run.folder / 'config.toml'} lacks micro_batch_size or cpu_threads; put them back")
    train_set, eval_sets = build.make_datasets(task, config)
    if task.updates is not None and eval_sets and task.metrics is None and task.compute_metrics is None:
        raise Refused(
            f"{task.file} has updates and an evaluation set, and no figure to evaluate: define metrics(model, batch), "
            "or let datasets() return None for it"
        )
    if run is not None:
        warnings = check_data(run, task, config, train_set, eval_sets)
    named = {"checkpoint.best": config.checkpoint.best, "early_stopping.metric": config.early_stopping.metric}
    for field, text in named.items():
        if text and (run is None or field in given):
            known = {name: None for line in evaluations(run) for name in line["eval"]} if run is not None else ()
            check_metric(field, text, config, task, eval_sets, known)
    check_sync_batchnorm(config, device, ranks, len(train_set))
    total = build.total_steps(config, build.plan_of(config, len(train_set)))
    schedule.check(task, config, total)
    if run is None or "log.trace" in given:
        trace.steps_of(config.log.trace, run.newest_checkpoint if run is not None else 0, total)
    is_first_of_several = run is not None and run.read()["world_size"] == 1 < ranks
    model = None
    if run is None or is_first_of_several or choose.shards(config, ranks) or config.parallel.recompute:
        model = _checked_model(task, config, ranks, precision)
    initial = initial_weights.fitted(task, config, model) if run is None and model is not None else None
    return _Checked(device, cards, train_set, eval_sets, model, initial, warnings)


def _device(config: Config, local: int, run: Run | None) -> torch.device:
    """The device of the first rank; a resume stays on GPUs if it began on them, unless its user says otherwise.

    Raises:
        Refused: as pick_device; or the run needs a GPU and is not to use one.
    """
    if run is not None and config.precision in ON_GPU_ALONE and (config.device == "cpu" or not cuda.device_count()):
        problem = f"{run.name} computes in {config.precision}, which a CPU has not, and a resume may not change that"
        raise Refused(f"{problem}; resume it where torch sees a GPU: nvidia-smi")
    try:
        return pick_device(config, local, 0)
    except NoGPU:
        if run is None:
            raise
        on_cpu = f"to continue on the CPU, with other bits: train resume {run.name} --device cpu"
        raise NoGPU(f"{run.name} computes on GPUs, and torch sees none here: see nvidia-smi; {on_cpu}") from None


def _files(request: Request, task: Task, config: Config, found: _Checked) -> dict[str, str | bytes]:
    """What lies in the folder of a new run."""
    data = build.fingerprint(task, config, found.train_set, found.eval_sets)
    files: dict[str, str | bytes] = {fingerprint.FACTS: json.dumps(data, indent=1) + "\n"}
    files["config.toml"] = configuration.to_toml(config)
    if not task.is_built_in:
        files["task.py"] = task.file.read_bytes()
        files |= imports.copies(task.file, Path(request.task).absolute().parent)
    if found.initial is not None:
        files[initial_weights.FILE] = found.initial.file()
    return files


def _record(request: Request, task: Task, config: Config, samples: int) -> dict[str, Any]:
    """What run.json says of a new run's task and data."""
    plan = build.plan_of(config, samples)
    source = None if task.is_built_in else Path(request.task).absolute()
    return {
        "task": task.name if task.is_built_in else "task.py",
        "task_source": str(source) if source else None,
        "task_imports": imports.digests(task.file, source.parent) if source else {},
        "task_sha256": task.sha256,
        "cwd": os.getcwd(),
        "total_steps": build.total_steps(config, plan),
        "samples": samples,
        "git_revision": provenance.git_revision(),
    }


def check_data(run: Run, task: Task, config: Config, train_set: Any, eval_sets: dict[str, Any]) -> list[str]:
    """Whether the data are those that a run began with. Returns warnings.

    Raises:
        Refused: they are not.
    """
    differs = data_differs(run, task, config, train_set, eval_sets)
    if differs:
        raise Refused(
            f"the data differ from those that {run.name} began with: {differs}; put them back as they were, "
            f"or begin anew with its weights: --init {run.name}"
        )
    samples = run.read().get("samples", len(train_set))
    if len(train_set) != samples:  # of a run of an earlier version, for others differ by now
        raise Refused(
            f"the training set has {len(train_set)} samples now and had {samples} when {run.name} was started; put "
            "the data back as it was"
        )
    if (fingerprint.recorded(run.folder) or {}).get("format", fingerprint.FORMAT) != fingerprint.FORMAT:
        return [f"{run.name} is of an earlier version: whether its data have changed is not compared"]
    return []


def edited(run: Run, record: Record) -> list[str]:
    """Warnings about files of a task that have changed since."""
    lines = []
    source = record.get("task_source")
    if source and imports.digest(Path(source)) not in ("", record.get("task_sha256")):
        lines.append(f"{source} has changed since; {run.name} goes on with its own copy")
    changed = imports.changed(record.get("task_imports"))
    if changed:
        which = "its own copy" if (run.folder / imports.MODULES).is_file() else "it as it is now"
        lines.append(f"{changed}, imported by the task, changed since or gone; {run.name} goes on with {which}")
    return lines


def _cut_batch(config: Config, ranks: int) -> None:
    """Give the micro batch its size, where none is given.

    Raises:
        Refused: the one that is given leaves a rank without work.
    """
    if not isinstance(config.micro_batch_size, int):
        # rounded up as the smallest number of forwards; rounded down where that would leave a rank without work
        size = -(-config.batch_size // ranks)
        config.micro_batch_size = size if -(-config.batch_size // size) >= ranks else config.batch_size // ranks
    check_micro_batches(config, ranks)


def _checked_model(task: Task, config: Config, ranks: int, precision: Precision) -> torch.nn.Module:
    """The model, which so many ranks can train, spread and compute again as `parallel` says, with its optimizer.

    Raises:
        Refused: they cannot.
    """
    model = build.make_model(task, config, precision.weights)
    build.check_forward(task, model)
    choose.check_model(model, ranks, precision.device)
    if choose.shards(config, ranks):
        from train.parallel import fsdp

        if task.inference_model is not None:
            how = config.parallel.strategy
            raise Refused(f"{how} computes whole models alone: use ddp, or leave out inference_model in {task.file}")
        fsdp.check(model, config.parallel.wrap)
    build.inference_model(task, model)
    recompute(model, config.parallel.recompute)
    with without_compiler():
        read_updates(task, model, config)
    make_objects(task, model, config, torch.device("cpu"))
    return model


def check_ranks(config: Config, local: int, nodes: range) -> None:
    """Whether a run can be spread as `parallel` says on any of these numbers of machines, a sample for every rank.

    Args:
        local: ranks of each machine.
        nodes: numbers of machines.

    Raises:
        Refused: it cannot.
    """
    for count in nodes:
        choose.check(config, count * local)
    ranks = nodes[-1] * local
    if config.batch_size < ranks:
        raise Refused(
            f"--batch_size {config.batch_size} is smaller than the number of ranks {ranks}; "
            f"use at least {ranks}, or fewer ranks"
        )


def check_metric(
    field: str, text: str, config: Config, task: Task, eval_sets: Collection[str], known: Collection[str] = ()
) -> None:
    """Whether evaluations give the figure that a field names, as far as that is known.

    Args:
        known: the figures of the run's evaluations; none before there was one.

    Raises:
        Refused: they do not.
    """
    metric = best.aim_of(text).metric
    if not eval_sets:
        why = f"datasets() in {task.file} returns None for the evaluation set; leave it out"
        raise Refused(f"--{field} {text} needs evaluations, and {why}")
    weights = ("", "ema.") if config.ema.decay is not None else ("",)
    prefixes = [which + (f"{name}." if name else "") for which in weights for name in eval_sets]
    is_open = not known and (task.metrics is not None or task.compute_metrics is not None)
    if is_open and metric and any(map(metric.startswith, prefixes)):
        return  # only the first evaluation says which names there are
    known = known or [f"{prefix}loss" for prefix in prefixes if task.loss is not None]
    if metric not in known:
        likely = {prefix + metric.rpartition(".")[2] for prefix in prefixes if is_open and metric}
        names = nearest(metric, likely.union(known), f"; there are: {', '.join(known)}")
        raise Refused(f"--{field} {text}: no evaluation gives {metric or 'a figure without a name'}{names}")


def check_micro_batches(config: Config, ranks: int) -> None:
    """Whether every rank has work; a size that is to be found will see to that.

    Raises:
        Refused: it has not.
    """
    if not isinstance(config.micro_batch_size, int):
        return
    micros = -(-config.batch_size // config.micro_batch_size)
    if micros < ranks:
        raise Refused(
            f"{ranks} ranks have only {micros} micro batches of {config.micro_batch_size} in a global batch of "
            f"{config.batch_size}; use --micro_batch_size {config.batch_size // ranks} or less"
        )


def check_sync_batchnorm(config: Config, device: torch.device, ranks: int, length: int) -> None:
    if not config.sync_batchnorm:
        return
    if device.type == "cpu":
        raise Refused("sync_batchnorm needs GPUs: torch has none for CPUs; leave it out")
    if config.data.leaves_out and ranks > 1:
        raise Refused(
            f"sync_batchnorm waits for a micro batch of every rank, and --data.on_error {config.data.on_error} may "
            "leave one without any; leave out one of them"
        )
    assert isinstance(config.micro_batch_size, int)
    share, rest = config.micro_batch_size * ranks, length % config.batch_size
    if config.batch_size % share or (rest % share and not config.data.drop_last):
        raise Refused(
            f"sync_batchnorm needs every global batch to divide evenly among the ranks: batch_size "
            f"{config.batch_size} and the rest of an epoch, {rest}, must be multiples of "
            f"micro_batch_size x ranks = {share}; --data.drop_last true leaves out the rest"
        )

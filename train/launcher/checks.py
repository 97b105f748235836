"""Everything that can be wrong with a run is found here, before anything is created or changed.

`prepare` checks a new run, `prepare_resume` one that continues; what both need is checked by the same functions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from train import config as configuration
from train import gpus
from train.checkpoint import manifest as manifests
from train.config import Config
from train.data import fingerprint
from train.data.fetch import is_indexed_at_once
from train.errors import Refused, nearest
from train.launcher import provenance
from train.launcher.request import ALONE, Request, parsed, resolve, settings_types
from train.parallel import choose
from train.parallel.devices import NoGPU, check_kernels, pick_device
from train.parallel.precision import ON_GPU_ALONE, Precision
from train.parallel.torch_private import without_compiler
from train.parallel.wrap_units import recompute
from train.run import best
from train.run.metrics import evaluations
from train.run.record import Record
from train.run.run_folder import Run
from train.tasks import Task
from train.trainer import arithmetic, build
from train.trainer.build import config_of, data_differs, task_of
from train.trainer.loggers import wandb
from train.trainer.optimizer import make_optimizer


@dataclasses.dataclass
class Prepared:
    """A run that has passed every check: what to create its folder with."""

    task: Task
    config: Config
    files: dict[str, str | bytes]
    record: dict[str, Any]


def prepare(request: Request) -> Prepared:
    """Check a new run from its flags to its data, and choose what its user has left open.

    Raises:
        Refused: it cannot be run as asked for.
    """
    task, config = resolve(request)
    ranks, everywhere = request.ranks, request.ranks * request.nodes[-1]
    device = pick_device(config, ranks, 0)
    config.device = "cuda" if device.type == "cuda" else "cpu"  # a resume must not find another one without a word
    found = _cards(device)
    precision = Precision(config.precision, device)
    check_ranks(config, ranks, request.nodes, device)
    wandb.check(config.log.wandb)
    chosen = [name for name in ("micro_batch_size", "cpu_threads") if getattr(config, name) in (None, "auto")]
    is_searched = config.micro_batch_size == "auto"
    _cut_batch(config, everywhere)
    train_set, eval_set = build.make_datasets(task, config)
    check_best(config, task, eval_set)
    sizes = _micro_batch_sizes(config, device, everywhere, len(train_set)) if is_searched else []
    if not sizes:
        check_sync_batchnorm(config, device, everywhere, len(train_set))
    if config.data.workers is None:
        config.data.workers = arithmetic.loaders(ranks, device, is_indexed_at_once(train_set, task.collate))
    model = checked_model(task, config, everywhere, precision)
    with without_compiler():
        make_optimizer(task, model, config)
    micro_reason = _find_micro_batch(request, config, sizes) if is_searched else ""
    threads_reason = ""
    if config.cpu_threads is None:
        config.cpu_threads, threads_reason = arithmetic.threads(ranks, device, model)
    files = _files(task, config, _weights(request, model), build.fingerprint(task, config, train_set, eval_set))
    record = _record(request, task, config, len(train_set)) | {
        "world_size": everywhere,
        "chosen": chosen,
        "cpu_threads_reason": threads_reason,
        "micro_batch_size_reason": micro_reason,
        "versions": provenance.versions(found),
    }
    return Prepared(task, config, files, record)


def _cards(device: torch.device) -> list[gpus.Card]:
    """The GPUs that this process sees, where it computes on them.

    Raises:
        Refused: torch has no kernels for one.
    """
    found = gpus.seen_here() if device.type == "cuda" else []
    check_kernels(found)
    return found


def _find_micro_batch(request: Request, config: Config, sizes: Sequence[int]) -> str:
    """Set the size of a micro batch to the first of these that fits in memory. Returns how it was found."""
    from train.launcher import batch_size

    flat = configuration.to_flat(config)
    if config.parallel.shard_size is not None:  # a try has the ranks of this machine alone
        flat["parallel.shard_size"] = math.gcd(config.parallel.shard_size, request.ranks)
    config.micro_batch_size, reason = batch_size.find(request.task, request.copy, flat, request.ranks, sizes)
    return reason


def _weights(request: Request, model: torch.nn.Module) -> dict[str, str | bytes]:
    """The file of the weights that --init names, as the run keeps them."""
    if request.init is None:
        return {}
    from safetensors.torch import save

    build.set_weights(model, build.read_weights(Path(request.init)), request.init)
    return {"init.safetensors": save({name: t.contiguous().clone() for name, t in model.state_dict().items()})}


def _files(task: Task, config: Config, weights: dict[str, str | bytes], data: Any) -> dict[str, str | bytes]:
    """What lies in the folder of a new run."""
    files = {
        **weights,
        "config.toml": configuration.to_toml(config),
        fingerprint.FACTS: json.dumps(data, indent=1) + "\n",
    }
    if not task.is_built_in:
        files["task.py"] = task.file.read_bytes()
    return files


def _record(request: Request, task: Task, config: Config, samples: int) -> dict[str, Any]:
    """What run.json says of a new run's task and data."""
    plan = build.plan_of(config, samples)
    source = None if task.is_built_in else Path(request.task).absolute()
    return {
        "task": task.name if task.is_built_in else "task.py",
        "task_source": str(source) if source else None,
        "task_imports": provenance.digests(task.file, source.parent) if source else {},
        "task_sha256": task.sha256,
        "cwd": os.getcwd(),
        "total_steps": build.total_steps(config, plan),
        "steps_per_epoch": plan.steps_per_epoch,
        "samples": samples,
        "git_revision": provenance.git_revision(),
    }


def prepare_resume(run: Run, flags: dict[str, str], local: int, nodes: range = ALONE) -> tuple[Task, Config, list[str]]:
    """Check that a run can go on, with these changes; nothing is written. Also returns warnings.

    Args:
        local: ranks on this machine.
        nodes: numbers of machines that it may have.

    Raises:
        Refused: it cannot go on as it stands or as asked for.
    """
    record, task, ranks = run.read(), task_of(run), local * nodes[-1]
    config = _changed_config(run, task, flags)
    step, warnings = _newest_checkpoint(run, task, config)
    device = _device_again(run, config, local)
    precision = Precision(config.precision, device)
    if not isinstance(config.micro_batch_size, int) or config.cpu_threads is None:
        raise Refused(f"{run.folder / 'config.toml'} lacks micro_batch_size or cpu_threads; put them back")
    check_ranks(config, local, nodes, device)
    wandb.check(config.log.wandb)
    train_set, eval_set = build.make_datasets(task, config)
    warnings += _check_data(run, record, task, config, train_set, eval_set)
    if "checkpoint.best" in flags:  # what a run has had from before is no reason to end it
        check_best(config, task, eval_set, {name: None for line in evaluations(run) for name in line["eval"]})
    check_sync_batchnorm(config, device, ranks, len(train_set))
    is_first_of_several = record["world_size"] == 1 < ranks
    if is_first_of_several or choose.shards(config, ranks) or config.parallel.recompute:  # else nothing to ask it
        checked_model(task, config, ranks, precision)
    plan = build.plan_of(config, len(train_set))
    total = build.total_steps(config, plan)
    if total < step:
        raise Refused(f"{run.name} has trained {step} steps already, more than the {total} now asked for")
    micros = plan.micro_batches(0)
    if micros < ranks:
        only = ranks - micros
        warnings.append(f"{ranks} ranks share {micros} micro batches per step: {only} of them compute nothing new")
    return task, config, warnings + _edited(run, record)


def _changed_config(run: Run, task: Task, flags: dict[str, str]) -> Config:
    """The configuration of a run with the changes of a resume.

    Raises:
        Refused: a field is unknown, or may not change.
    """
    config = config_of(run, task)
    before = configuration.to_flat(config)
    own = {f"task.{name}": hint for name, hint in settings_types(task).items()}
    changes = parsed(flags, own, task)
    if changes:
        config = configuration.build(configuration.layer(changes, task.Settings, "", before), task.Settings)
        if config.data.root:
            config.data.root = str(Path(config.data.root).absolute())
        _check_changes(before, configuration.to_flat(config), f"cannot change {run.name}")
    return config


def _newest_checkpoint(run: Run, task: Task, config: Config) -> tuple[int, list[str]]:
    """The step of the newest whole checkpoint, 0 without one, and warnings about damaged ones.

    Raises:
        Refused: it is not of this task and configuration.
    """
    step, manifest, warnings = manifests.newest_valid(run)
    if not manifest:
        return 0, warnings
    what = f"{run.folder / 'config.toml'} does not fit its checkpoints"
    _check_changes(manifest["config"], configuration.to_flat(config), what)
    if manifest.get("task_sha256") != task.sha256:
        raise Refused(f"{task.file} is not the task that {run.name} was trained with; put the original back")
    return step, warnings


def _check_data(run: Run, record: Record, task: Task, config: Config, train_set: Any, eval_set: Any) -> list[str]:
    """Whether the data are those that a run began with. Returns warnings.

    Raises:
        Refused: they are not.
    """
    differs = data_differs(run, task, config, train_set, eval_set)
    if differs:
        raise Refused(
            f"the data differ from those that {run.name} began with: {differs}; put them back as they were, "
            "or start a new run"
        )
    if len(train_set) != record.get("samples", len(train_set)):
        raise Refused(
            f"the training set has {len(train_set)} samples now and had {record['samples']} when {run.name} "
            "was started; put the data back as it was"
        )
    if (fingerprint.recorded(run.folder) or {}).get("format", fingerprint.FORMAT) != fingerprint.FORMAT:
        return [f"{run.name} is of an earlier version: whether its data have changed is not compared"]
    return []


def _edited(run: Run, record: Record) -> list[str]:
    """Warnings about files of a task that have changed since."""
    lines = []
    source = record.get("task_source")
    if source and manifests.sha256_of(Path(source)) not in ("", record.get("task_sha256")):
        lines.append(f"{source} has changed since; {run.name} goes on with its own copy")
    changed = provenance.changed(record.get("task_imports"), "task")
    if changed:
        lines.append(f"{changed}; no copy was kept, so {run.name} goes on with it as it is now")
    return lines


def _device_again(run: Run, config: Config, ranks: int) -> torch.device:
    """The device of a resume: GPUs if it began on them, unless its user says otherwise."""
    on_cpu = f"to go on on the CPU, with other bits: train resume {run.name} --device cpu"
    if config.precision in ON_GPU_ALONE:
        on_cpu = f"its precision {config.precision} needs one, so resume it where there is one"
    try:
        device = pick_device(config, ranks, 0)
    except NoGPU:
        raise NoGPU(f"{run.name} computes on GPUs, and torch sees none here: see nvidia-smi; {on_cpu}") from None
    if device.type == "cpu" and config.precision in ON_GPU_ALONE:
        raise Refused(
            f"{run.name} computes in {config.precision}, which a CPU has not, and a resume may not change that; "
            "resume it where there is a GPU"
        )
    config.device = "cuda" if device.type == "cuda" else "cpu"
    _cards(device)
    return device


def _check_changes(before: dict[str, Any], after: dict[str, Any], what: str) -> None:
    forbidden = configuration.forbidden_changes(before, after)
    if forbidden:
        name = forbidden[0]
        raise Refused(
            f"{what}: {name} was {before.get(name)} and is {after.get(name)} now; put it back, or start a new run "
            f"(a resume may change {configuration.changeable()})"
        )


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


def checked_model(task: Task, config: Config, ranks: int, precision: Precision) -> torch.nn.Module:
    """The model, which so many ranks can train, spread and compute again as `parallel` says.

    Raises:
        Refused: it cannot.
    """
    model = build.make_model(task, config, precision.weights)
    build.check_forward(task, model)
    choose.check_model(model, ranks, precision.device)
    if choose.shards(config, ranks):
        from train.parallel import fsdp

        fsdp.check(model, config.parallel.wrap)
    recompute(model, config.parallel.recompute)
    return model


def check_ranks(config: Config, local: int, nodes: range, device: torch.device) -> None:
    """Whether a run can be spread as `parallel` says on any of these numbers of machines, a sample for every rank.

    Args:
        local: ranks of each machine.
        nodes: numbers of machines.

    Raises:
        Refused: it cannot.
    """
    for count in nodes:
        choose.check(config, count * local, device)
    ranks = nodes[-1] * local
    if config.batch_size < ranks:
        raise Refused(
            f"--batch_size {config.batch_size} is smaller than the number of ranks {ranks}; "
            f"use at least {ranks}, or fewer ranks"
        )


def check_best(config: Config, task: Task, eval_set: Any, known: Iterable[str] = ()) -> None:
    """Whether evaluations can say which checkpoint is the best, as far as that is known.

    Args:
        known: the figures of the run's evaluations; none before there was one.

    Raises:
        Refused: they cannot, so that no checkpoint would be the best one.
    """
    text = config.checkpoint.best
    if not text:
        return
    metric = best.aim_of(text).metric
    if eval_set is None:
        raise Refused(
            f"--checkpoint.best {text} needs evaluations, and datasets() in {task.file} returns None for the "
            "evaluation set; leave it out"
        )
    if metric != "loss" and task.metrics is None:
        raise Refused(
            f"--checkpoint.best {text}: {task.file} has no function metrics, so an evaluation gives the loss alone; "
            "use --checkpoint.best loss"
        )
    if not metric or (known and metric not in known):
        names = nearest(metric, known, f"; there are: {', '.join(known) or 'loss and the names that metrics() gives'}")
        raise Refused(f"--checkpoint.best {text}: no evaluation gives {metric or 'a figure without a name'}{names}")


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


def _micro_batch_sizes(config: Config, device: torch.device, ranks: int, length: int) -> list[int]:
    """The configured size and its halves down to 1, as far as sync_batchnorm can have them."""
    assert isinstance(config.micro_batch_size, int)
    sizes = [config.micro_batch_size]
    while sizes[-1] > 1:
        sizes.append(sizes[-1] // 2)
    found = []
    for size in sizes:
        with contextlib.suppress(Refused):
            check_sync_batchnorm(dataclasses.replace(config, micro_batch_size=size), device, ranks, length)
            found.append(size)
    return found


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

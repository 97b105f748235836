"""Everything that can be wrong with going on is found here, before anything is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch

from train import config as configuration
from train import gpus
from train.config import Config
from train.data import fingerprint
from train.engine import build
from train.engine.build import config_of, data_differs, task_of
from train.engine.loggers import wandb
from train.errors import Refused
from train.parallel import cards, choose
from train.parallel.precision import ON_GPU_ALONE, Precision
from train.parallel.world import NoGPU, pick_device
from train.record import manifest as manifests
from train.record import station
from train.record.durable import write_atomically
from train.record.metrics import evaluations
from train.record.record import Record
from train.record.store import Run
from train.runs import imports
from train.runs.admit import check_best, check_ranks, check_sync_batchnorm, checked_model
from train.runs.request import ALONE, parsed, settings_types
from train.tasks import Task


def prepare_resume(run: Run, flags: dict[str, str], local: int, nodes: range = ALONE) -> tuple[Task, Config, list[str]]:
    """Check that a run can go on, with these changes; nothing is written. Also returns warnings.

    Args:
        local: ranks on this machine.
        nodes: numbers of machines that it may have.

    Raises:
        Refused: it cannot go on as it stands or as asked for.
    """
    record, task, ranks = run.read(), task_of(run), local * nodes[-1]
    config = config_of(run, task)
    before = configuration.to_flat(config)
    own = {f"task.{name}": hint for name, hint in settings_types(task).items()}
    changes = parsed(flags, own, task)
    if changes:
        flat = configuration.layer(changes, task.Settings, "", before)
        config = configuration.build(flat, task.Settings)
        if config.data.root:
            config.data.root = str(Path(config.data.root).absolute())
        _check_changes(before, configuration.to_flat(config), f"cannot change {run.name}")
    found = manifests.newest_valid(run)
    warnings: list[str] = list(found[2]) if found else []
    step, manifest = (found[0], found[1]) if found else (0, {})
    if manifest:
        _check_changes(
            manifest["config"],
            configuration.to_flat(config),
            f"{run.folder / 'config.toml'} does not fit its checkpoints",
        )
        if manifest.get("task_sha256") != task.sha256:
            raise Refused(f"{task.file} is not the task that {run.name} was trained with; put the original back")
    device = _device_again(run, config, local)
    precision = Precision(config.precision, device)
    if not isinstance(config.micro_batch_size, int) or config.cpu_threads is None:
        raise Refused(f"{run.folder / 'config.toml'} lacks micro_batch_size or cpu_threads; put them back")
    check_ranks(config, local, nodes, device)
    wandb.check(config.log.wandb)
    train_set, eval_set = build.make_datasets(task, config)
    differs = data_differs(run, task, config, train_set, eval_set)
    if differs:
        raise Refused(
            f"the data differ from those that {run.name} began with: {differs}; put them back as they were, "
            "or start a new run"
        )
    if (fingerprint.recorded(run.folder) or {}).get("format", fingerprint.FORMAT) != fingerprint.FORMAT:
        warnings.append(f"{run.name} is of an earlier version: whether its data have changed is not compared")
    if len(train_set) != record.get("samples", len(train_set)):
        raise Refused(
            f"the training set has {len(train_set)} samples now and had {record['samples']} when {run.name} "
            "was started; put the data back as it was"
        )
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


def _edited(run: Run, record: Record) -> list[str]:
    """What is to be said of a task's files that are not what they were."""
    lines = []
    source = record.get("task_source")
    if source and manifests.sha256_of(Path(source)) not in ("", record.get("task_sha256")):
        lines.append(f"{source} has changed since; {run.name} goes on with its own copy")
    said = imports.changed(record.get("task_imports"), "task")
    if said:
        lines.append(f"{said}; no copy was kept, so {run.name} goes on with it as it is now")
    return lines


def _device_again(run: Run, config: Config, ranks: int) -> torch.device:
    """Where a run goes on: on GPUs if it began on them, unless its user says otherwise."""
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
    if device.type == "cuda":
        cards.check(gpus.seen_here())
    return device


def apply_resume(run: Run, config: Config) -> None:
    """Write the changes of a resume into the run folder."""
    write_atomically(run.folder / "config.toml", configuration.to_toml(config))
    run.update(lambda record: record.update(cast(Record, station.mark(run.folder, record))))


def _check_changes(before: dict[str, Any], after: dict[str, Any], what: str) -> None:
    forbidden = configuration.forbidden_changes(before, after)
    if forbidden:
        name = forbidden[0]
        raise Refused(
            f"{what}: {name} was {before.get(name)} and is {after.get(name)} now; put it back, or start a new run "
            f"(a resume may change {configuration.changeable()})"
        )

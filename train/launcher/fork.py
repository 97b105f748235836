"""Checks a new run that continues from a checkpoint of another run, and lists what it takes from that run."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from .. import config as configuration
from ..build import cores, objects
from ..build.hooks import Hooks
from ..build.objects import config_of, task_of
from ..build.updates import read_updates, spread_updates
from ..checkpoint import manifest as manifests
from ..checkpoint.load import load
from ..config import Config, Parallel
from ..data import fingerprint
from ..errors import Refused
from ..parallel.precision import cpu_precision
from ..parallel.world import World
from ..run import imports, owner
from ..run.run_folder import Run
from ..run.spec import spec_of
from ..tasks import Task
from ..trainer import early_stopping
from . import batch_norm, checks, deterministic, provenance, rate_change
from .request import ALONE, Plan
from .resume import check_data
from .task_source import of_run
from .unused_fields import asked, of_no_use

_OF_FORK = ("task.py", imports.MODULES, fingerprint.FACTS, "metrics.jsonl")
"""Files that a fork copies from the forked run, besides a checkpoint."""
_RECORD_OF_FORK = (
    "task", "task_source", "task_imports", "task_watched", "task_sha256", "cwd", "chosen", "sets_epoch",
)  # fmt: skip
"""Fields of run.json that a fork copies from the forked run."""
_PLAIN = (bool, int, float, str, list, tuple, type(None))
"""Types of an optimizer's arguments that can be compared."""


def prepare_fork(run: Run, step: int, flags: dict[str, str], ranks: int) -> Plan:
    """Check a new run that continues from a checkpoint of this one, with these changes.

    Raises:
        Refused: it cannot continue so.
    """
    mine = owner.opened(run)
    record = mine.read()
    spec = spec_of(record, mine.read_config())
    task = task_of(run, spec)
    before = config_of(run, task)
    config = configuration.with_flags(
        flags, settings=task.Settings, task_file=task.file, flat=configuration.to_flat(before)
    )
    if config.optim.name != before.optim.name:
        way = f"start a new run with its weights: --init {run.name}@{step}"
        raise Refused(f"--optim.name {config.optim.name} cannot load the state of {before.optim.name}; {way}")
    if config.overfit != before.overfit:
        raise Refused(f"a fork cannot change --overfit; start a new run with its weights: --init {run.name}@{step}")
    config.init = config.init_skip = ""  # the weights come from the checkpoint
    manifest, folder = manifests.verified(run, step), run.checkpoint(step)
    is_other = "batch_size" in flags or ranks != record["world_size"]
    config.micro_batches = config.micro_batches or "full"  # the run is from an earlier version
    if is_other and "micro_batch_size" not in flags and "micro_batch_size" in spec.chosen:
        config.micro_batch_size = None
    if config.micro_batch_size == "auto":
        raise Refused("--micro_batch_size auto does not work for a fork; give a number")
    if config.precision == "auto":
        raise Refused(f"--precision auto does not work for a fork; give {before.precision}, or another one")
    checks.cut_batch(config, ranks, ALONE)
    source = of_run(run, task, spec)
    found = checks.check_run(task, config, ranks, ranks, asked(source, flags))
    model = checks.check_model(task, config, ranks, found.precision)
    if config.cpu_threads is None:
        config.cpu_threads, _ = cores.default_threads(ranks, found.precision.device, model)
    warnings = [*found.warnings, *check_data(run, spec, task, config, found.train_set, found.eval_sets)]
    warnings += imports.edited(run, spec)
    if found.total <= step:
        end = f"the new run would end after step {found.total}; give more --epochs or --steps"
        raise Refused(f"the checkpoint is of step {step}, but {end}")
    early_stopping.check_goes_on(config.early_stopping, run, range(step, found.total))
    batch_norm.check(
        task, config, found.train_set, lambda: model, samples=found.samples, ranks=ranks,
        steps=range(step, found.total),
    )  # fmt: skip
    no_use = of_no_use(task, source)
    warnings += rate_change.warnings(
        run, spec, task, (before, config), samples=found.samples, step=step, flags=flags, is_fork=True,
        has_rate="optim.lr" not in no_use,
    )  # fmt: skip
    changed = _changed(run, step, task, model, before, config).union(manifest.get("changed", ()))
    deterministic.check(task, config, found.precision.device, found.train_set, model)  # it takes the model's values
    text = manifests.manifest_text(manifest | {"config": configuration.to_flat(config), "changed": sorted(changed)})
    there = f"checkpoints/{folder.name}"
    copies = {name: run.folder / name for name in _OF_FORK if (run.folder / name).exists()} | {there: folder}
    files: dict[str, str | bytes] = {
        "config.toml": configuration.to_toml(config), f"{there}/{manifests.MANIFEST}": text
    }  # fmt: skip
    made: dict[str, Any] = {key: value for key, value in record.items() if key in _RECORD_OF_FORK} | {
        "step": step, "epoch": manifest["epoch"], "total_steps": found.total, "git_revision": provenance.git_revision(),
        "versions": provenance.versions(found.cards), "forked_from": {"run": run.name, "step": step},
        "compiles_torch": True, "samples": objects.plan_of(config, found.samples).length, "sampler": task.sampler,
        "warnings": warnings, "unused_fields": no_use, "not_exact": checks.not_exact(task, config, found),
        "gathers_products": True,
    }  # fmt: skip
    warnings += [f"not exact: {line}" for line in made["not_exact"]]
    return Plan(files=files, record=made, copies=copies, warnings=warnings, ranks=ranks)


def _changed(run: Run, step: int, task: Task, model: nn.Module, before: Config, after: Config) -> set[str]:
    """Check that a checkpoint fits the changed configuration. Returns the optimizer arguments that change with it.

    Args:
        model: The checked model; the state of the checkpoint is loaded into it.

    Raises:
        Refused: the checkpoint does not fit the model, the optimizer or another part of the new configuration.
    """
    after = dataclasses.replace(after, device="cpu", parallel=Parallel())
    world, precision = World(0, size=1, local_rank=0, device=torch.device("cpu")), cpu_precision(after)
    (update, *_), optimizer = spread_updates(task, model, config=after, world=world, precision=precision)
    new = [dict(group) for group in optimizer.param_groups]
    try:
        load(
            run.checkpoint(step),
            model,
            optimizer=optimizer,
            by_itself=True,
            extra=Hooks(task, update.strategy, after).extra,
        )
    except ValueError as error:
        raise Refused(f"{error}; start a new run with its weights: --init {run.name}@{step}") from None
    old = [group for update in read_updates(task, model, before) for group in update.optimizer.param_groups]
    past = {id(parameter): group for group in old for parameter in group["params"]}
    return {
        key
        for group in new
        for key, value in group.items()
        if key not in ("params", "lr")
        and isinstance(value, _PLAIN)
        and value != past.get(id(group["params"][0]), group).get(key)
    }

"""Loads the state of a run: the newest one in memory or on the disk for an attempt, or a trained model alone."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

import torch
from torch import nn

from train.checkpoint import level, serialize, snapshot
from train.checkpoint.buffers import Buffers
from train.checkpoint.level import Newest
from train.checkpoint.load import load
from train.checkpoint.snapshot import Snapshots
from train.config import Config
from train.engine import build
from train.errors import Refused
from train.parallel.precision import ON_GPU_ALONE, Precision
from train.parallel.world import World
from train.record import manifest as manifests
from train.record import metrics
from train.record.store import Run
from train.tasks import Task

log = logging.getLogger("train")


@dataclasses.dataclass(frozen=True)
class ResumeState:
    """The state that an attempt continues from."""

    step: int = 0
    """After this one; 0: from the beginning."""
    saved: int = 0
    """The step of the newest checkpoint on the disk."""
    manifest: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of the checkpoint of `step`; {}: it is not from a checkpoint."""
    from_memory: bool = False


def load_newest(
    run: Run, world: World, snapshots: Snapshots, model: torch.nn.Module, optimizer: torch.optim.Optimizer,
    precision: Precision,
) -> ResumeState:  # fmt: skip
    """Load the newest state that is whole, from memory or from the disk. A collective."""
    rates, buffers = [group["lr"] for group in optimizer.param_groups], snapshots.buffers
    newest = functools.cache(lambda: _newest_valid(run))  # reads every byte of it
    while True:
        start = _choose(run, world, snapshots, newest)
        if buffers is None or not start.from_memory:
            break
        content = snapshot.read(buffers, world, start.step, snapshots.fingerprint)
        if content is not None:
            serialize.apply(content, model, optimizer, precision)
            break
        if world.is_lead:
            log.warning(
                "warning: the state after step %d in memory is damaged or of other ranks, and is not used", start.step
            )
    if buffers is not None:
        buffers.wipe_from(start.step + start.from_memory)
    if start.manifest:
        load(run.checkpoint(start.step), model, optimizer, by_itself=len(world.leads) > 1)
        if precision.scaler is not None and start.manifest.get("scaler"):
            precision.scaler.load_state_dict(start.manifest["scaler"])
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate  # the schedule starts from the configured rates, not from the saved one
    return start


def _choose(run: Run, world: World, snapshots: Snapshots, newest: Newest) -> ResumeState:
    """Choose the state to continue from, on one machine or on several. A collective.

    Args:
        newest: `_newest_valid`, on the first rank of a machine.
    """
    buffers = snapshots.buffers
    if buffers is not None and (snapshots.is_sharded or len(world.leads) == 1):
        start = _from_memory(run, world, buffers, newest)
        if start is not None:
            return start
        buffers = None
    if len(world.leads) == 1:
        return world.on_first(lambda: _from_disk(run, newest))
    agreed = level.agree(run, world, buffers, snapshots.fingerprint, snapshots.memory_left, newest)
    if world.is_lead and agreed.problem:
        log.warning("warning: %s", agreed.problem)
    world.on_leads(lambda: metrics.cut(run, agreed.step, agreed.made_here))
    return ResumeState(agreed.step, agreed.saved, agreed.manifest, agreed.from_memory)


def _from_memory(run: Run, world: World, buffers: Buffers, newest: Newest) -> ResumeState | None:
    """The newest copy that all ranks have, where it is not older than any checkpoint; None: none is."""
    step, saved = snapshot.newest_common(buffers, world), _newest_saved(run, world)
    if 0 < step < max(saved):  # a damaged checkpoint is not newer
        world.on_leads(newest)
        saved = _newest_saved(run, world)
    if not step or step < max(saved):
        return None

    def clear_away() -> None:
        manifests.clean(run)
        metrics.cut(run, step)

    world.on_leads(clear_away)
    return ResumeState(step, min(saved), from_memory=True)


def _newest_saved(run: Run, world: World) -> list[int]:
    """The step of the newest checkpoint in each rank's run folder. A collective."""
    return world.gather(next(iter(run.steps_saved()), 0))


def _from_disk(run: Run, newest: Newest) -> ResumeState:
    """On rank 0: clear away what a kill left, choose the checkpoint to continue from, cut the lines to it."""
    manifests.clean(run)
    step, manifest = newest()
    metrics.cut(run, step)
    return ResumeState(step, step, manifest)


def _newest_valid(run: Run) -> tuple[int, dict[str, Any]]:
    """The newest checkpoint that is whole, and its manifest; 0 and {} without one. Newer ones are set aside."""
    step, manifest, unused = manifests.take_newest(run)
    for line in unused:
        log.warning("warning: %s", line)
    return step, manifest


def load_trained(run: Run, step: int | None = None) -> tuple[Task, Config, nn.Module, int]:
    """The task, configuration and trained model of a run, from its newest whole checkpoint or that of a step.

    Raises:
        Refused: there is no such checkpoint, or it is damaged.
    """
    task = build.task_of(run)
    config = build.config_of(run, task)
    if step is not None:
        if step not in run.steps_saved():
            saved = ", ".join(map(str, sorted(run.steps_saved()))) or "none"
            raise Refused(f"{run.name} has no checkpoint of step {step}; there are: {saved}")
        try:
            manifests.verify(run.checkpoint(step))
        except ValueError as error:
            raise Refused(f"the checkpoint of step {step} is damaged: {error}") from None
    else:
        found = manifests.newest_valid(run)
        for line in found[2] if found else []:
            log.warning("warning: %s", line)
        if not found or not found[1]:
            raise Refused(f"{run.name} has no usable checkpoint yet; see: train show {run.name}")
        step = found[0]
    model = build.make_model(task, config, cpu_precision(config).weights)
    try:
        load(run.checkpoint(step), model)
    except ValueError as error:
        differs = build.data_differs(run, task, config, *build.make_datasets(task, config))
        why = f"; the data differ from those that {run.name} began with: {differs}; put them back" if differs else ""
        raise Refused(f"{error}{why}") from None
    return task, config, model, step


def precision_on(device: torch.device, config: Config) -> str:
    """The precision to compute with on a device: fp32 on a CPU for those that only GPUs have."""
    return "fp32" if device.type == "cpu" and config.precision in ON_GPU_ALONE else config.precision


def cpu_precision(config: Config) -> Precision:
    """The precision of a run as a CPU computes it."""
    cpu = torch.device("cpu")
    return Precision(precision_on(cpu, config), cpu)

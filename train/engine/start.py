"""Where an attempt continues: after the newest state that is whole, from memory or from the disk."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from train.checkpoint import level, serialize, snapshot
from train.checkpoint.buffers import Buffers
from train.checkpoint.level import Newest
from train.checkpoint.state import load
from train.parallel.precision import Precision
from train.parallel.world import World
from train.record import manifest as manifests
from train.record import metrics
from train.record.store import Run

log = logging.getLogger("train")


@dataclasses.dataclass(frozen=True)
class Start:
    """Where an attempt continues."""

    step: int = 0
    """After this one; 0: from the beginning."""
    saved: int = 0
    """The step of the newest checkpoint on the disk."""
    manifest: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of the checkpoint of `step`; {}: it is not from a checkpoint."""
    from_memory: bool = False


def restore(
    run: Run, world: World, buffers: Buffers | None, fingerprint: str, model: torch.nn.Module,
    optimizer: torch.optim.Optimizer, precision: Precision, is_spread: bool, left: Callable[[], int],
) -> Start:  # fmt: skip
    """Take up the newest state that is whole, from memory or from the disk. A collective.

    Args:
        left: bytes of memory that can still be had.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    newest = functools.cache(lambda: _newest_valid(run))  # reads every byte of it
    while True:
        start = _begin(run, world, buffers, fingerprint, is_spread, left, newest)
        if buffers is None or not start.from_memory:
            break
        content = snapshot.take_up(buffers, world, start.step, fingerprint)
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


def _begin(
    run: Run, world: World, buffers: Buffers | None, fingerprint: str, is_spread: bool, left: Callable[[], int],
    newest: Newest,
) -> Start:  # fmt: skip
    """Choose the state to continue from, on one machine or on several. A collective.

    Args:
        newest: `_newest_valid`, on the first rank of a machine.
    """
    if buffers is not None and (is_spread or len(world.leads) == 1):
        start = _begin_from_memory(run, world, buffers, newest)
        if start is not None:
            return start
        buffers = None
    if len(world.leads) == 1:
        return world.on_first(lambda: _begin_from_disk(run, newest))
    agreed = level.agree(run, world, buffers, fingerprint, left, newest)
    if world.is_lead and agreed.problem:
        log.warning("warning: %s", agreed.problem)
    world.on_leads(lambda: metrics.cut(run, agreed.step, agreed.made_here))
    return Start(agreed.step, agreed.saved, agreed.manifest, agreed.from_memory)


def _begin_from_memory(run: Run, world: World, buffers: Buffers, newest: Newest) -> Start | None:
    """Where all ranks have a copy that is not older than any checkpoint; None: on the disk."""
    kept, saved = snapshot.newest_common(buffers, world), _saved(run, world)
    if 0 < kept < max(saved):  # a damaged checkpoint is not newer
        world.on_leads(newest)
        saved = _saved(run, world)
    if not kept or kept < max(saved):
        return None

    def clear_away() -> None:
        manifests.clean(run)
        metrics.cut(run, kept)

    world.on_leads(clear_away)
    return Start(kept, min(saved), from_memory=True)


def _saved(run: Run, world: World) -> list[int]:
    """The step of the newest checkpoint in each rank's run folder. A collective."""
    return world.gather(next(iter(run.steps_saved()), 0))


def _begin_from_disk(run: Run, newest: Newest) -> Start:
    """On rank 0: clear away what a kill left, choose the checkpoint to continue from, cut the lines to it."""
    manifests.clean(run)
    step, manifest = newest()
    metrics.cut(run, step)
    return Start(step, step, manifest)


def _newest_valid(run: Run) -> tuple[int, dict[str, Any]]:
    """The newest checkpoint that is whole, and its manifest; 0 and {} without one. Newer ones are set aside."""
    step, manifest, unused = manifests.take_newest(run)
    for line in unused:
        log.warning("warning: %s", line)
    return step, manifest

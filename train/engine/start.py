"""Where an attempt continues: after the newest state that is whole, from memory or from the disk."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from train.checkpoint import level, packed, shares
from train.checkpoint.level import Newest
from train.checkpoint.packed import Content
from train.checkpoint.shared import Slots
from train.checkpoint.state import load
from train.parallel.precision import Precision
from train.parallel.world import World
from train.record import manifest as manifests
from train.record import metrics
from train.record.metrics import Training
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
    slot: int | None = None
    """The buffer in which the state after `step` lies in memory; None: it does not."""
    lines: list[Training] = dataclasses.field(default_factory=list)
    """Training lines that the snapshot brings with it."""


def restore(
    run: Run, world: World, slots: Slots | None, fingerprint: str, model: torch.nn.Module,
    optimizer: torch.optim.Optimizer, precision: Precision, is_spread: bool, left: Callable[[], int],
) -> Start:  # fmt: skip
    """Take up the newest state that is whole, from memory or from the disk. A collective.

    Args:
        left: bytes of memory that can still be had.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    newest = functools.cache(lambda: _newest_valid(run))  # reads every byte of it
    while True:
        start = _begin(run, world, slots, fingerprint, is_spread, left, newest)
        if slots is None or start.slot is None:
            break
        content = _read(slots, world, start, fingerprint, is_spread)
        if content is not None:
            packed.apply(content, model, optimizer, precision)
            start = dataclasses.replace(start, lines=content.lines)
            break
        if world.is_lead:
            log.warning(
                "warning: the state after step %d in memory is damaged or of other ranks, and is not used", start.step
            )
    if slots is not None and not is_spread and world.is_lead:
        # what lies there of steps that are made anew would take the place of theirs
        slots.wipe_from(start.step + (start.slot is not None))
    if start.manifest:
        load(run.checkpoint(start.step), model, optimizer, by_itself=len(world.leads) > 1)
        if precision.scaler is not None and start.manifest.get("scaler"):
            precision.scaler.load_state_dict(start.manifest["scaler"])
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate  # the schedule starts from the configured rates, not from the saved one
    return start


def _read(slots: Slots, world: World, start: Start, fingerprint: str, is_spread: bool) -> Content | None:
    """The state in memory, on all ranks; None, and forgotten, where any of them cannot read it. A collective."""
    assert start.slot is not None
    if is_spread:
        return shares.take_up(slots, world, start.step, fingerprint)
    content = packed.read(slots, start.slot, fingerprint)
    if world.is_everywhere(content is not None):
        return content
    if world.is_lead:
        slots.wipe(start.slot)
    return None


def _begin(
    run: Run, world: World, slots: Slots | None, fingerprint: str, is_spread: bool, left: Callable[[], int],
    newest: Newest,
) -> Start:  # fmt: skip
    """Choose the state to continue from, on one machine or on several. A collective.

    Args:
        newest: `_newest_valid`, on the first rank of a machine.
    """
    if is_spread and slots is not None:
        start = _begin_from_parts(run, world, slots, newest)
        if start is not None:
            return start
        slots = None
    if len(world.leads) == 1:
        return world.on_first(lambda: _begin_here(run, slots, newest))
    agreed = level.agree(run, world, slots, fingerprint, left, newest)
    if world.is_lead and agreed.problem:
        log.warning("warning: %s", agreed.problem)
    world.on_leads(lambda: metrics.cut(run, agreed.step, agreed.made_here))
    return Start(agreed.step, agreed.saved, agreed.manifest, agreed.slot)


def _begin_from_parts(run: Run, world: World, slots: Slots, newest: Newest) -> Start | None:
    """Where all ranks have their parts of a state that is not older than any checkpoint; None: on the disk."""
    saved = world.gather(next(iter(run.steps_saved()), 0))
    if 0 < min(world.gather(max(slots.steps, default=0))) < max(saved):  # a damaged checkpoint is not newer
        world.on_leads(newest)
        saved = world.gather(next(iter(run.steps_saved()), 0))
    kept = shares.newest(slots, world, max(saved))
    if not kept:
        return None

    def clear_away() -> None:
        manifests.clean(run)
        metrics.cut(run, kept)

    world.on_leads(clear_away)
    return Start(kept, min(saved), slot=slots.steps[kept])


def _begin_here(run: Run, slots: Slots | None, newest: Newest) -> Start:
    """On rank 0: clear away what a kill left, choose the state to continue from, cut the records to it."""
    manifests.clean(run)
    kept = slots.newest() if slots is not None else None
    slot, in_memory = (kept[0], kept[1].step) if kept is not None else (None, -1)
    step, manifest = next(iter(run.steps_saved()), 0), dict[str, Any]()
    if in_memory < step or slot is None:
        step, manifest = newest()
    if in_memory >= step:
        metrics.cut(run, in_memory)
        return Start(in_memory, step, slot=slot)
    metrics.cut(run, step)
    return Start(step, step, manifest)


def _newest_valid(run: Run) -> tuple[int, dict[str, Any]]:
    """The newest checkpoint that is whole, and its manifest; 0 and {} without one. Newer ones are set aside."""
    step, manifest, unused = manifests.take_newest(run)
    for line in unused:
        log.warning("warning: %s", line)
    return step, manifest

"""Loads the state of a run: the newest one in memory or on the disk for an attempt, or a trained model alone."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..build import objects
from ..build.first_weights import mender
from ..build.optimizer import has_modes, make_optimizer
from ..checkpoint import manifest as manifests
from ..checkpoint import serialize
from ..checkpoint.extra import Extra
from ..checkpoint.load import load
from ..checkpoint.newest import ResumeState, newest_state, newest_valid
from ..checkpoint.snapshot import Snapshots
from ..checkpoint.state_dict import TrainState, weights_of
from ..config import Config
from ..errors import Refused
from ..parallel.precision import cpu_precision
from ..parallel.world import World
from ..run import metrics
from ..run.run_folder import Run
from ..run.spec import Spec
from ..tasks import Task

log = logging.getLogger("train")


def load_newest(
    run: Run, home: Run, world: World, snapshots: Snapshots, state: TrainState, beat: Callable[[], None], *,
    sees_home: bool, mend: manifests.Mend,
) -> ResumeState:  # fmt: skip
    """Load the newest state that is whole, from memory or from the disk. A collective.

    Args:
        run: its lines are cut to that state, on each machine.
        home: where checkpoints lie.
        sees_home: whether all ranks see that folder. Otherwise rank 0 loads alone, and sends the state to the others.
        beat: gives a sign of life of this rank.
        mend: writes a damaged file of frozen weights again.
    """
    fresh = [dict(group) for group in state.optimizer.param_groups]
    if sees_home:
        start = _load(home, world, snapshots, state, beat, mend)
    else:  # the other machines get the state from rank 0
        alone = world.of_rank_0()
        start = world.patient.on_first(lambda: _load(home, alone, snapshots, state, beat, mend))
        serialize.broadcast_state(world, state)
    if world.nodes == 1:
        world.on_first(lambda: metrics.cut(run, start.step))
    else:
        began = world.broadcast(_began(home) if world.is_first else None)
        world.on_leads(lambda: metrics.cut(run, start.step, _parted(_began(run), began)))
    # the schedule starts from the configured rates, not from the saved ones
    configured = {"lr", *start.manifest.get("changed", ())}
    for group, own in zip(state.optimizer.param_groups, fresh, strict=True):
        group.update({key: own[key] for key in configured & own.keys()})
    return start


def _began(run: Run) -> list[tuple[str, int]]:
    """Return the attempts that reached training on this machine: the mark of each, and the step it started after."""
    return [(one["mark"], one["from_step"] or 0) for one in run.attempts() if one.get("mark")]


def _parted(mine: list[tuple[str, int]], theirs: list[tuple[str, int]]) -> float:
    """Return the step after which rank 0's machine continued without this one; infinite if it did not."""
    known = {mark for mark, _ in mine}
    common = max((place for place, (mark, _) in enumerate(theirs) if mark in known), default=None)
    if common is None:
        return math.inf
    return min((step for _, step in theirs[common + 1 :]), default=math.inf)


def _load(
    run: Run, world: World, snapshots: Snapshots, state: TrainState, beat: Callable[[], None], mend: manifests.Mend
) -> ResumeState:
    scaler = state.precision.scaler
    start, content = newest_state(run, world, snapshots, beat=beat, mend=mend)
    if content is not None:
        serialize.apply(content, state)
    if start.manifest:
        waits = world.patient.group if world.size > 1 else None
        load(
            run.checkpoint(start.step),
            state.module,
            optimizer=state.optimizer,
            by_itself=world.size == 1,
            extra=state.extra,
            group=waits,
        )
        if scaler is not None and start.manifest.get("scaler"):
            scaler.load_state_dict(start.manifest["scaler"])
    return start


Change = Callable[[Task, Config], Config]
Trained = tuple[Task, Config, nn.Module, int, dict[str, Tensor]]
"""The task, configuration, trained model and step of a run, and the average of its weights by name (`ema.decay`); {}:
no average."""


def load_trained(run: Run, spec: Spec, step: int | None = None, change: Change | None = None) -> Trained:
    """Load a trained model from the newest whole checkpoint of a run, or from that of a step.

    Args:
        change: Changes the configuration of the run.

    Raises:
        Refused: there is no such checkpoint, or it is damaged.
    """
    task = objects.task_of(run, spec)
    config = objects.config_of(run, task)
    mend = mender(run, task, config)
    if change is not None:
        config = change(task, config)
    if step is not None:
        manifests.verified(run, step, mend)
    else:
        step, manifest = newest_valid(run, mend)
        if not manifest:
            where = " here; it is on node 0" if spec.cluster and spec.cluster["node"] else ""
            raise Refused(f"{run.name} has no usable checkpoint yet{where}; see: train show {run.name}")
    model = objects.make_model(task, config, cpu_precision(config).weights)
    optimizer = make_optimizer(task, model, config) if task.optimizer is not None else None
    if optimizer is not None and not has_modes(optimizer):
        optimizer = None
    averaged = weights_of(model) if config.ema.decay is not None else {}
    average = {name: torch.empty_like(tensor) for name, tensor in averaged.items()}
    try:
        load(run.checkpoint(step), model, optimizer=optimizer, extra=Extra(average))
    except ValueError as error:
        train_set, eval_sets = objects.make_datasets(task, config)
        differs = objects.data_differs(run, task, config=config, train_set=train_set, eval_sets=eval_sets)
        why = f"; the data differ from those that {run.name} began with: {differs}; put them back" if differs else ""
        raise Refused(f"{error}{why}") from None
    if optimizer is not None:
        optimizer.eval()  # type: ignore[attr-defined] # what it evaluates is in its state
    return task, config, model, step, average

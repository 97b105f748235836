"""Where a fork starts: with a checkpoint of the forked run, or at step 0 with its initial weights."""

from __future__ import annotations

import dataclasses

import torch

from .. import config as configuration
from ..build import initial_weights
from ..build.first_weights import mender
from ..build.hooks import Hooks
from ..build.updates import read_updates, spread_updates
from ..checkpoint import manifest as manifests
from ..checkpoint.load import load
from ..config import Parallel
from ..errors import Refused, described, one_line
from ..parallel.precision import cpu_precision
from ..parallel.world import World
from .case import Case

_PLAIN = (bool, int, float, str, list, tuple, type(None))
"""Types of an optimizer's arguments that can be compared."""


def check(case: Case) -> list[str]:
    """Add to the plan of a fork what it starts with. Loads the state of a checkpoint into the checked model. Returns
    warnings.

    Raises:
        Refused: it does not fit.
    """
    return _at_checkpoint(case) if case.of.step else _at_beginning(case)


def _at_checkpoint(case: Case) -> list[str]:
    run, step, told = case.of.run, case.of.step, list[str]()
    mend = mender(run, case.task, case.of.before, tell=told.append)
    manifest, folder = manifests.verified(run, step, mend), run.checkpoint(step)
    changed = _changed(case)
    text = manifests.manifest_text(manifest | {
        "config": configuration.to_flat(case.config), "changed": sorted(changed.union(manifest.get("changed", ()))),
        "task_sha256": case.task.sha256,
    })  # fmt: skip
    there = f"checkpoints/{folder.name}"
    beside = [run.metrics] if run.metrics.exists() else []
    if frozen := manifest.get("frozen"):
        beside.append(run.folder / manifests.frozen_name(frozen))
    case.record["epoch"] = manifest["epoch"]
    case.files[f"{there}/{manifests.MANIFEST}"] = text
    case.copies |= {there: folder} | {path.name: path for path in beside}
    if changed and _sets_optimizer(case):
        names = ", ".join(sorted(changed))
        told.append(f"the optimizer takes {names} from {case.task.file.name}, not from the checkpoint")
    return told


def _at_beginning(case: Case) -> list[str]:
    run, task = case.of.run, case.task
    kept = run.folder / initial_weights.FILE
    if not kept.exists():
        if case.edited:
            case.keep_initial_weights()
        return []
    shapes = {name: value.shape for name, value in case.model.state_dict().items()}
    for name, value in initial_weights.read(kept, str(kept)).items():
        if shapes.get(name) != value.shape:
            here = f"{[*shapes[name]]} in" if name in shapes else "not in"
            way = f"start a new run: train launch {task.file}"
            raise Refused(f"the initial weights of {run.name} do not fit: {name} is {here} the model now; {way}")
    case.record["init"], case.copies[initial_weights.FILE] = case.of.record.get("init") or [], kept
    is_new = case.edited and (task.pretrained is not None or task.adapt_state_dict is not None)
    return [f"the initial weights are those of {run.name}: pretrained() is not called again"] if is_new else []


def _sets_optimizer(case: Case) -> bool:
    """Whether edited code makes the optimizer, so that its arguments may have been edited."""
    return bool(case.edited) and any((case.task.optimizer, case.task.updates, case.task.param_groups))


def _changed(case: Case) -> set[str]:
    """Check that the checkpoint fits the changed configuration. Returns the optimizer arguments that change with it.

    Raises:
        Refused: the checkpoint does not fit the model, the optimizer or another part of the new configuration.
    """
    run, step, task, model = case.of.run, case.of.step, case.task, case.model
    after = dataclasses.replace(case.config, device="cpu", parallel=Parallel())
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
    except Exception as error:
        if not case.edited:
            raise
        why = one_line(described(error))[:300]
        raise Refused(f"the checkpoint of step {step} cannot be loaded by {task.file}: {why}") from error
    if _sets_optimizer(case):
        old = optimizer.param_groups  # what the edited function set before is only known from the checkpoint
    else:
        old = [group for update in read_updates(task, model, case.of.before) for group in update.optimizer.param_groups]
    past = {id(parameter): group for group in old for parameter in group["params"]}
    return {
        key
        for group in new
        for key, value in group.items()
        if key not in ("params", "lr")
        and isinstance(value, _PLAIN)
        and value != past.get(id(group["params"][0]), group).get(key)
    }

"""Warns if a resume or a fork changes the learning rate by changing the length of the run."""

from __future__ import annotations

import math
import shlex

from ..build import objects
from ..build.schedule import Planned, factor_at, moved, rate_scale
from ..config import Config
from ..run.metrics import each, history, is_evaluation, last_training
from ..run.run_folder import Run
from ..run.spec import Spec
from ..tasks import Task


def warnings(
    run: Run, spec: Spec, task: Task, configs: tuple[Config, Config], *, samples: int, step: int,
    flags: dict[str, str], is_fork: bool, has_rate: bool,
) -> list[str]:  # fmt: skip
    """Return a line that says how the learning rate moves and how to keep it; [] if it does not move.

    Args:
        configs: The configuration before the change and after it.
        samples: Number of samples of an epoch.
        step: The step after which the run continues.
        flags: The fields that change.
        has_rate: Whether optim.lr is the learning rate.
    """
    before, after = (_planned(config, samples) for config in configs)
    with objects.refusing(task, "schedule()"):
        factor = moved(task, before=before, after=after, step=step, history=history(run, step))
    if factor is None:
        return []
    peak = _peak(run, spec, task, before)
    old = _logged(run, step) or peak * factor[0]
    new = peak * factor[1] * _base(after.config) / _base(before.config)
    if math.isclose(old, new, rel_tol=1e-2):
        return []
    then, now = (
        f"{'schedule()' if task.schedule is not None else one.config.schedule.decay} over {one.total_steps} steps"
        for one in (before, after)
    )
    moves = f"the learning rate changes from {old:.3g} in step {step} to {new:.3g} in step {step + 1}"
    text = f"{moves} ({now} now, {then} before)"
    wanted = (
        {} if not has_rate or {"optim.lr", "schedule.decay"} & flags.keys() else _stays(task, after.config, old, new)
    )
    if wanted:
        typed = " ".join(f"--{name} {shlex.quote(value)}" for name, value in (flags | wanted).items())
        begin = "" if is_fork else f"train fork {run.name} --name NEW --checkpoint {step} "
        text += f"; to keep {old:.3g}: {begin}{typed}"
    return [text]


def _planned(config: Config, samples: int) -> Planned:
    plan = objects.plan_of(config, samples)
    return Planned(config, plan.steps_per_epoch, objects.total_steps(config, plan))


def _base(config: Config) -> float:
    return config.optim.lr * rate_scale(config)


def _logged(run: Run, step: int) -> float | None:
    """Return the learning rate logged for a step; the run may have had another length then. None: not logged."""
    last = last_training(run)
    lines = [last] if last is not None and last["step"] <= step else each(run)
    return next((line.get("lr") for line in lines if line["step"] == step and not is_evaluation(line)), None)


def _peak(run: Run, spec: Spec, task: Task, planned: Planned) -> float:
    """Return the peak learning rate of the first group, from the run's last line: the task's optimizer may set it."""
    line, fork = last_training(run), spec.forked_from
    if line is not None and line["step"] > (fork["step"] if fork else 0):
        factor = factor_at(task, planned, line["step"] - 1, history(run))
        if factor and line.get("lr"):
            return line["lr"] / factor
    return _base(planned.config)


def _stays(task: Task, config: Config, old: float, new: float) -> dict[str, str]:
    """Return the fields with which a fork continues at the old rate; {} if no field sets the rate."""
    if not old or not new:
        return {}
    if task.schedule is not None:
        return {"optim.lr": f"{config.optim.lr * old / new:.3g}"}
    return {"schedule.decay": "constant", "optim.lr": f"{old / rate_scale(config):.3g}"}

"""Warns if a resume or a fork changes the learning rate by changing the length of the run."""

from __future__ import annotations

import dataclasses
import math
import shlex
from decimal import Decimal

from ..build import objects
from ..build.schedule import Planned, factor_at, factors, moved, rate_scale
from ..config import Config
from ..run.metrics import each, history, is_evaluation, last_training
from ..run.run_folder import Run
from ..run.spec import Spec
from ..tasks import Task
from .case import Case, Kind

_WAYS = ("schedule.total_epochs", "schedule.start_epoch")
"""Fields that say which curve is wanted."""


def warnings(case: Case) -> list[str]:
    """Return a line that says how the learning rate moves, and the ways to choose; [] if it does not move.

    A task's own schedule() may not depend on the length, and then give 0 for the steps that are new.
    """
    run, spec, step, task, flags = case.of.run, case.of.spec, case.of.step, case.task, case.of.flags
    if case.kind is Kind.FORK and not step:
        return []
    before, after = (_planned(config, case.samples) for config in (case.of.before, case.config))
    past = history(run, step)
    with objects.refusing(task, "schedule()"):
        factor = moved(task, before=before, after=after, step=step, history=past)
        added = (
            range(max(step, before.total_steps), after.total_steps) if step and task.schedule is not None else range(0)
        )
        if factor is None and not added:
            return []
        rates = factors(task, after, past)
        is_idle = bool(added) and not any(map(rates, added))
        factor = factor or (factor_at(task, before, step=step - 1, history=past), rates(step))
        peak = _peak(run, spec, task, before)
    old = _logged(run, step) or peak * factor[0]
    new = peak * factor[1] * _base(after.config) / _base(before.config)
    if math.isclose(old, new, rel_tol=1e-2) and not is_idle:
        return []
    then, now = (
        f"{'schedule()' if task.schedule is not None else one.config.schedule.decay} over {one.end - one.start} steps"
        for one in (before, after)
    )
    text = (
        f"the learning rate was {old:.3g} in step {step} and is {new:.3g} in step {step + 1} ({now} now, {then} before)"
    )
    if is_idle:
        text += f"; it is 0 in steps {added.start + 1} to {added.stop}, which train nothing"
    begin = "" if case.kind is Kind.FORK else f"train fork {run.name} --name NEW --checkpoint {step} "
    for what, field in _ways(task, before, after, step, past) if not flags.keys() & _WAYS else ():
        typed = " ".join(f"--{name} {shlex.quote(value)}" for name, value in (flags | field).items())
        text += f"; {what}: {begin}{typed}"
    return [text]


def _planned(config: Config, samples: int) -> Planned:
    plan = objects.plan_of(config, samples)
    return Planned(config, plan.steps_per_epoch, objects.total_steps(config, plan))


def _ways(
    task: Task, before: Planned, after: Planned, step: int, past: list[dict[str, object]]
) -> list[tuple[str, dict[str, str]]]:
    """Return the fields with which a fork continues on another curve, each with what it does."""
    ways, schedule = [], after.config.schedule
    kept = dataclasses.replace(schedule, total_epochs=before.end / after.steps_per_epoch)
    keeps = after._replace(config=dataclasses.replace(after.config, schedule=kept))
    if moved(task, before=before, after=keeps, step=step, history=past) is None:
        ways.append(("to keep the old curve and hold its end", {_WAYS[0]: _epochs(before.end, after)}))
    return [*ways, ("for a new cycle", {_WAYS[1]: _epochs(step, after)})]


def _epochs(steps: int, planned: Planned) -> str:
    """Return a number of steps in epochs, with as few digits as give these steps again."""
    texts = (f"{Decimal(f'{steps / planned.steps_per_epoch:.{digits}g}'):f}" for digits in range(1, 18))
    return next(text for text in texts if round(float(text) * planned.steps_per_epoch) == steps)


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
        factor = factor_at(task, planned, step=line["step"] - 1, history=history(run))
        if factor and line.get("lr"):
            return line["lr"] / factor
    return _base(planned.config)

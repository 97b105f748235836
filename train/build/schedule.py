"""The learning rate of a step: a function of its number, so that nothing of it is saved."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config import Config, decays
from ..errors import Refused, TrainingFailed
from ..parallel.torch_private import version_of
from ..run.best import aim_of, improvements
from ..tasks import Task
from .objects import refusing

Past = Mapping[str, Any]
"""An evaluation: its step, its epoch and its figures, by name. A figure that was not finite is None."""


def rate_scale(config: Config) -> float:
    """Return the factor between optim.lr and the peak learning rate.

    linear: batch_size / base_batch_size (Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 2.1).
    """
    return config.batch_size / config.schedule.base_batch_size if config.schedule.scaling == "linear" else 1.0


def rate_factors(config: Config, steps_per_epoch: int, total_steps: int, drops: int = 0) -> Callable[[int], float]:
    """Return the function from a step (counted from 0) to the factor of the peak learning rate, after this many drops
    of plateau.

    The warm-up rises linearly and reaches 1 with its last step. Decays that end would reach min_factor at total_steps,
    so every step has a positive rate.
    """
    schedule, decay = config.schedule, decays.of(config.schedule.decay)
    warmup = 0 if decay.rises_by_itself else _warmup(config, steps_per_epoch, total_steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        place = decays.Place(step, warmup, total_steps, steps_per_epoch, drops)
        return max(decay.curve(schedule, place), schedule.min_factor)

    return factor


def _warmup(config: Config, steps_per_epoch: int, total_steps: int) -> int:
    return min(round(config.schedule.warmup_epochs * steps_per_epoch), total_steps)


def plateau_drops(config: Config, history: Sequence[Past], since: int) -> int:
    """Return how often decay plateau has dropped the learning rate.

    It drops after each `patience` evaluations in a row without an improvement. The best value so far stays. That is
    torch's ReduceLROnPlateau with threshold 0 and patience - 1.

    Args:
        since: The step with which the warm-up ends; earlier evaluations do not count.
    """
    aim, drops, waited = aim_of(config.schedule.metric), 0, 0
    scores = (line.get(aim.metric) for line in history if line["step"] >= since)
    for is_better in improvements(scores, aim):
        waited = 0 if is_better else waited + 1
        if waited == config.schedule.patience:
            drops, waited = drops + 1, 0
    return drops


class Planned(NamedTuple):
    """The values that the schedule of a run depends on, besides its evaluations."""

    config: Config
    steps_per_epoch: int
    total_steps: int

    @property
    def start(self) -> int:
        """The step with which the curve starts."""
        return round(self.config.schedule.start_epoch * self.steps_per_epoch)

    @property
    def end(self) -> int:
        """The step with which it ends. Steps after it have the rate of its last step."""
        epochs = self.config.schedule.total_epochs
        return self.total_steps if epochs is None else max(1, round(epochs * self.steps_per_epoch))


def takes_history(function: Callable[..., Any]) -> bool:
    """Whether a task's schedule() also takes the evaluations so far: schedule(step, total_steps, config, history)."""
    try:
        signature = inspect.signature(function)
        signature.bind("step", "total_steps", "config")
    except TypeError:
        return True
    except ValueError:  # of a function in C nothing is known
        return False
    return "history" in signature.parameters


def why_relative(task: Task, config: Config) -> str:
    """Return why the learning rate of a step depends on the length of the run; '' if it does not."""
    if config.schedule.total_epochs is not None:
        return ""
    if task.schedule is not None:
        return f"schedule() in {task.file} gets the length of the run"
    name = config.schedule.decay
    return f"--schedule.decay {name} depends on the length of the run" if decays.of(name).is_stretched else ""


def follows_evaluations(task: Task, config: Config) -> bool:
    """Whether the learning rate depends on the evaluations of a run."""
    if task.schedule is not None:
        return takes_history(task.schedule)
    return decays.of(config.schedule.decay).follows_evaluations


def factors(task: Task, planned: Planned, history: Sequence[Past] = ()) -> Callable[[int], float]:
    """Return the function from a step to the factor of the peak rate: the task's schedule(), or that of
    config.schedule.

    Args:
        history: The evaluations up to the step, see run/metrics.py.
    """
    config, per_epoch, start = planned.config, planned.steps_per_epoch, planned.start
    if task.schedule is None:
        decay, drops = decays.of(config.schedule.decay), 0
        last = planned.end - 1 if decay.is_stretched else math.inf
        total = (planned.end if decay.is_stretched else planned.total_steps) - start
        if decay.follows_evaluations:
            drops = plateau_drops(config, history, start + _warmup(config, per_epoch, total))
        curve = rate_factors(config, per_epoch, total, drops)
        return lambda step: curve(int(max(min(step, last) - start, 0)))
    own, has_history = task.schedule, takes_history(task.schedule)

    def factor(step: int) -> float:
        step = max(min(step, planned.end - 1) - start, 0)
        more = [[*history]] if has_history else []  # a copy: a task may sort its list
        value: Any = own(step, planned.end - start, config, *more)
        is_number = isinstance(value, Real)  # of NumPy too
        if not is_number or not 0 <= value < math.inf:
            raise TrainingFailed(
                f"schedule in {task.file} returns {value!r} for step {step}, counted from 0; return a finite number "
                "that is not negative: the factor of the learning rate"
            )
        return float(value)

    return factor


def check(task: Task, planned: Planned) -> None:
    """Check that the learning rate can be computed.

    Raises:
        Refused: fields exclude each other, or the task's own schedule() fails in the first step.
    """
    schedule = planned.config.schedule
    name, decay = schedule.decay, decays.of(schedule.decay)
    if decay.rises_by_itself and schedule.warmup_epochs:
        raise Refused(
            f"--schedule.decay {name} rises by itself, over 30 % of the steps; leave out --schedule.warmup_epochs"
        )
    if task.schedule is None and decay.follows_evaluations:
        if not schedule.metric:
            raise Refused(f"--schedule.decay {name} needs a metric; give --schedule.metric, such as max:accuracy")
        if schedule.gamma == 1:
            raise Refused("--schedule.gamma 1 makes no drop; give less than 1")
    if schedule.start_epoch:
        if task.schedule is None and name == decays.CONSTANT and not schedule.warmup_epochs:
            raise Refused("--schedule.start_epoch has no effect on a constant learning rate; leave it out, or give 0")
        if planned.start >= min(planned.end, planned.total_steps):
            end = min(planned.end, planned.total_steps) / planned.steps_per_epoch
            other = "" if schedule.total_epochs is None else ", or another --schedule.total_epochs"
            raise Refused(
                f"--schedule.start_epoch {schedule.start_epoch:g}: give less than the end, epoch {end:.6g}{other}"
            )
    with refusing(task, "schedule()"):
        factors(task, planned)(0)


def factor_at(task: Task, planned: Planned, *, step: int, history: Sequence[Past]) -> float:
    """Return the factor of the peak rate in a step, counted from 0, by the evaluations up to it."""
    return factors(task, planned, [line for line in history if line["step"] <= step])(step)


def moved(
    task: Task, *, before: Planned, after: Planned, step: int, history: Sequence[Past]
) -> tuple[float, float] | None:
    """Return the factors of the peak rate in the last step made (counted from 1) and in the next one, if a change of
    the configuration moves the schedule there; else None."""
    old, new = (functools.partial(factor_at, task, planned, history=history) for planned in (before, after))
    alike = [step - 1, *([step] if step < before.total_steps else [])]
    if not step or all(math.isclose(old(step=at), new(step=at), rel_tol=1e-6) for at in alike):
        return None
    return old(step=step - 1), new(step=step)


class Rates:
    """Gives the groups of an optimizer their learning rates, step by step."""

    def __init__(
        self, task: Task, planned: Planned, *, optimizer: torch.optim.Optimizer, history: Sequence[Past] = ()
    ) -> None:
        self._groups = optimizer.param_groups
        self._task, self._planned = task, planned
        self.follow(history)
        self._peaks = [group["lr"] * rate_scale(planned.config) for group in self._groups]
        # a task's may be a tensor on a GPU: reading it waits for the GPU, so once and not in every step
        self._logged = float(self._peaks[0])
        self._set: list[float | Tensor] = []
        """The rates of the step before."""
        self._versions: list[int] = []
        """The versions of rates that are tensors, which may be written to in place."""
        self._has_tensors = any(type(rate) is not float for rate in self._peaks)

    def follow(self, history: Sequence[Past]) -> None:
        """Let the next steps depend on these evaluations."""
        self._factor = factors(self._task, self._planned, history)

    def set_for(self, step: int) -> float:
        """Set the rates of a step, counted from 0. Returns that of the first group.

        Raises:
            TrainingFailed: something else has changed one since the step before.
        """
        now = [group["lr"] for group in self._groups]
        # lists hold one object for equal to itself, so that no tensor is read here
        if self._set and (now != self._set or (self._has_tensors and _versions(now) != self._versions)):
            changed = next((float(one) for one, rate in zip(now, self._set, strict=True) if one is not rate), now[0])
            raise TrainingFailed(
                f"the learning rate is {float(changed):g} after step {step}, because a scheduler or hook of the "
                "task has changed it; a resume could not restore that: define schedule(step, total_steps, "
                "config) instead, which returns a factor of the rate"
            )
        factor = self._factor(step)
        self._set = [peak * factor for peak in self._peaks]
        for group, rate in zip(self._groups, self._set, strict=True):
            group["lr"] = rate
        if self._has_tensors:
            self._versions = _versions(self._set)
        return self._logged * factor


def _versions(rates: list[float | Tensor]) -> list[int]:
    return [version_of(rate) for rate in rates]

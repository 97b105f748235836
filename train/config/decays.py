"""The decays: the values of `schedule.decay`, and what follows from each for the rest of the program.

To add a decay, write its curve here, and add a line to DECAYS. Other code asks this table and compares no names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

_ONE_CYCLE = (0.3, 1 / 25, 1e-4)
"""Numbers of torch's OneCycleLR: the share of the steps in which the rate rises, the first factor, and the last factor
over the first."""


class Schedule(Protocol):
    """The fields of `schedule` (schema.py) that curves read."""

    min_factor: float
    decay_share: float
    step_epochs: float
    gamma: float


class Place(NamedTuple):
    """Where a step is on the curve."""

    step: int
    """Counted from 0, from the start of the curve."""
    warmup: int
    """Number of steps of the warm-up; the step is not one of them."""
    total: int
    """The step with which the curve ends."""
    per_epoch: int
    """Number of steps of an epoch."""
    drops: int
    """How often the evaluations so far have dropped the rate."""


class Decay(NamedTuple):
    """What the rest of the program knows of a decay."""

    name: str
    curve: Callable[[Schedule, Place], float]
    """Returns the factor of the peak learning rate, before `min_factor` limits it."""
    fields: tuple[str, ...] = ()
    """The fields of `schedule` that have an effect with this decay, but not with every one."""
    is_stretched: bool = False
    """Whether it is stretched over the run, and so depends on where the run ends."""
    follows_evaluations: bool = False
    rises_by_itself: bool = False
    """Whether its curve has a warm-up of its own."""


def _cosine(schedule: Schedule, at: Place) -> float:
    """Loshchilov and Hutter, "SGDR", 2017."""
    factor = 0.5 * (1 + math.cos(math.pi * (at.step - at.warmup) / max(at.total - at.warmup, 1)))
    return schedule.min_factor + (1 - schedule.min_factor) * factor


def _linear(schedule: Schedule, at: Place) -> float:
    least = schedule.min_factor
    return least + (1 - least) * (at.total - at.step) / max(at.total - at.warmup, 1)


def _wsd(schedule: Schedule, at: Place) -> float:
    """Hu et al., "MiniCPM", 2024."""
    falls = min(max(round(schedule.decay_share * at.total), 1), max(at.total - at.warmup, 1))
    return schedule.min_factor + (1 - schedule.min_factor) * min((at.total - at.step) / falls, 1.0)


def _one_cycle(_: Schedule, at: Place) -> float:
    """Smith and Topin, "Super-Convergence", 2018, as torch's OneCycleLR with cosines: up from 1/25, then down."""
    share, first, last = _ONE_CYCLE
    peak = share * at.total - 1
    if at.step <= peak:
        begin, end, passed = first, 1.0, at.step / peak
    else:
        begin, end, passed = 1.0, first * last, (at.step - peak) / (at.total - 1 - peak)
    return end + (begin - end) / 2 * (1 + math.cos(math.pi * passed))


def _steps(schedule: Schedule, at: Place) -> float:
    return schedule.gamma ** math.floor(at.step / (schedule.step_epochs * at.per_epoch) + 1e-9)


DECAYS = (
    Decay("constant", lambda schedule, at: 1.0),
    Decay("linear", _linear, ("min_factor", "total_epochs"), is_stretched=True),
    Decay("cosine", _cosine, ("min_factor", "total_epochs"), is_stretched=True),
    Decay("step", _steps, ("min_factor", "step_epochs", "gamma")),
    Decay("wsd", _wsd, ("min_factor", "decay_share", "total_epochs"), is_stretched=True),
    Decay("onecycle", _one_cycle, ("min_factor", "total_epochs"), is_stretched=True, rises_by_itself=True),
    Decay(
        "plateau", lambda schedule, at: schedule.gamma**at.drops, ("min_factor", "gamma", "metric", "patience"),
        follows_evaluations=True,
    ),
)  # fmt: skip
CONSTANT = DECAYS[0].name


def of(name: str) -> Decay:
    """Return the decay of this value of `schedule.decay`."""
    return next(decay for decay in DECAYS if decay.name == name)


def names() -> tuple[str, ...]:
    """Return the values of `schedule.decay`."""
    return tuple(decay.name for decay in DECAYS)


def with_field(field: str) -> tuple[str, ...]:
    """Return the values of `schedule.decay` with which a field of `schedule` has an effect."""
    return tuple(decay.name for decay in DECAYS if field in decay.fields)


def fields() -> list[str]:
    """Return the fields of `schedule` that have an effect with some decays only."""
    return list(dict.fromkeys(field for decay in DECAYS for field in decay.fields))

"""The figures of a run as columns to draw: read line by line, so that a million lines take 50 MB and not a GB."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from typing import Any

from train import screen
from train.record import metrics
from train.record.store import Run

LOSS, LR, SPEED, WAIT, STEP = "loss", "lr", "samples_per_s", "data_wait", "step_time"
_TRAINING = (LOSS, LR, SPEED, WAIT, STEP)
HIGHEST = 1e100
"""Above it matplotlib's axes overflow; a loss in single precision is infinite long before."""


def _column() -> array[float]:
    return array("d")  # eight bytes a figure; a float of Python's own takes 24, a line of them as a dict 900


@dataclass(frozen=True)
class Measure:
    """A figure of the evaluations: after which steps it was measured, and what it was."""

    steps: array[float] = field(default_factory=_column)
    values: array[float] = field(default_factory=_column)


@dataclass(frozen=True)
class Columns:
    """What the lines of a run have. nan, which leaves a gap, is where a line has no such figure, or none to draw."""

    steps: array[float] = field(default_factory=_column)
    """Of the training lines."""
    training: dict[str, array[float]] = field(default_factory=lambda: {name: _column() for name in _TRAINING})
    """LOSS, LR, SPEED, WAIT and STEP of each training line, in the units of metrics.Training."""
    evaluations: dict[str, Measure] = field(default_factory=dict)
    """By name, which is fit to be shown."""


def of(run: Run) -> Columns:
    """The lines that there are, in their order.

    Raises:
        OSError: they cannot be read.
    """
    found = Columns()
    for line in metrics.each(run):
        step: float = line["step"]
        if metrics.is_evaluation(line):
            for name, value in line["eval"].items():
                measure = found.evaluations.setdefault(screen.printable(name), Measure())
                measure.steps.append(step)
                measure.values.append(_figure(value))
        else:
            found.steps.append(step)
            for name, column in found.training.items():
                column.append(_figure(line.get(name)))
    return found


def _figure(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and abs(value) < HIGHEST else math.nan

"""`train.progress()`: tells a task's code the step that a batch is for. Set where a batch is fetched, in data workers
too, and where it comes to the device."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import Refused


class Progress(NamedTuple):
    """Where a run is. In an evaluation: the step that is evaluated, and its epoch."""

    step: int
    """Counted from 1, like `epoch`."""
    epoch: int
    total_steps: int


_now: dict[str, int] = {}
"""The present step and epoch, counted from 0, and the number of steps of the run."""


def progress() -> Progress:
    """Return the step and epoch that the present batch is for.

    Raises:
        Refused: there is no batch.
    """
    if "step" not in _now:
        raise Refused(
            "train.progress() is known only while a run fetches or computes a batch: call it in __getitem__, collate, "
            "on_device, loss, metrics or predict"
        )
    return Progress(_now["step"] + 1, _now["epoch"] + 1, _now["total_steps"])


def set_progress(step: int, epoch: int) -> None:
    """Set the step and epoch of the present batch, counted from 0."""
    _now["step"], _now["epoch"] = step, epoch


def set_total(steps: int) -> None:
    """Set the number of steps of the run. Call it before data workers are forked."""
    _now["total_steps"] = steps

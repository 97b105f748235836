"""Figures of a whole evaluation set: what `predict` returns is gathered on rank 0, which calls `compute_metrics` once.

Rank 0 holds the predictions of a whole set in memory, other ranks those of a few micro batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..build.loss import kind_of
from ..data.seeding import owned, seed_host, seed_owned
from ..data.to_device import mapped
from ..errors import TrainingFailed
from ..parallel.world import World
from ..run import heartbeat
from ..tasks import Task, where
from . import media

_ALONE = ""
"""The name of predictions that are only a list."""


class ComputeMetricsFailed(TrainingFailed):
    """compute_metrics raised an error."""


class Predictions:
    """The predictions for one evaluation set; empty for a task without `predict`.

    The predictions of a batch are a dict from names to tensors (the first dimension is the samples) or lists. A list
    alone has no name.
    """

    def __init__(self, task: Task, world: World, made_by: str = "") -> None:
        """`made_by`: what returns them, for messages; '': the task's `predict`, if it has one."""
        self._task, self._world = task, world
        self._what = f"{made_by or 'predict'} in {task.file}"
        self._are_made = bool(made_by) or task.predict is not None
        self._new: list[tuple[int, dict[str, Any]]] = []
        """Maps the number of a micro batch to predictions that rank 0 does not have yet."""
        self._all: dict[int, dict[str, Any]] = {}
        """On rank 0: maps the number of a micro batch to its predictions."""
        self.taken: set[str] = set()
        """Names of what `images` returned."""
        self.shown: dict[str, media.Media] = {}
        """On rank 0: the pictures, texts and sounds that `compute_metrics` returned, by their whole names."""

    def add(self, number: int, made: Any, samples: int) -> None:
        """Add what `predict` returned for a micro batch.

        Raises:
            TrainingFailed: this is not one prediction per sample.
        """
        what = f"{self._what} must"
        made = {_ALONE: made} if isinstance(made, list) else made
        if not isinstance(made, dict) or not made:
            raise TrainingFailed(f"{what} return a dict from names to tensors or lists, got {kind_of(made)}")
        for name, value in made.items():
            has_length = isinstance(value, list) or (isinstance(value, Tensor) and value.dim() > 0)
            if not has_length or len(value) != samples:
                raise TrainingFailed(
                    f"{what} give one {name or 'item'} a sample, a tensor with the batch first or a list: {samples} "
                    f"for this batch, got {kind_of(value)}"
                )
        self._new.append((number, mapped(made, _on_host)))

    def collect(self) -> None:
        """Send rank 0 the predictions that it does not have yet. A collective."""
        if self._are_made:
            for part in self._world.gather_on_first(self._new):
                self._all.update(part)
            self._new = []

    def figures(self, seed: int, beat: Callable[[int], None], prefix: str = "") -> dict[str, float]:
        """Return what `compute_metrics` computes for the whole set; {} for a set without samples. A collective.

        The other ranks wait for rank 0 as long as it takes.

        Args:
            prefix: what the names of pictures begin with, as those of the figures do.

        Raises:
            TrainingFailed: on all ranks: it failed, or returned something else than figures.
        """
        self.collect()
        if self._task.predict is None:
            return {}
        beat(heartbeat.COMPUTING_METRICS)
        figures = self._world.patient.on_first(lambda: self._computed(seed, prefix))
        beat(heartbeat.EVALUATING)
        return figures

    def _computed(self, seed: int, prefix: str) -> dict[str, float]:
        task, whole = self._task, self.joined()
        assert task.compute_metrics is not None
        if not whole:
            return {}
        seed_host(seed)
        seed_owned(owned(task.compute_metrics), seed)
        try:
            made = task.compute_metrics(whole.get(_ALONE, whole))
        except Exception as error:
            raise ComputeMetricsFailed(f"compute_metrics failed: {where(error, task.file)}") from error
        function = f"compute_metrics in {task.file}"
        if not isinstance(made, dict):
            raise TrainingFailed(f"{function} must return a dict of numbers, got {kind_of(made)}")
        figures = {}
        for name, value in made.items():
            figure = _number(value)
            if figure is not None and isinstance(value, str):  # it would be a text in TensorBoard, and no metric
                raise TrainingFailed(f"{function} gives {name} as the text {value!r}; return the number")
            if figure is not None:
                figures[str(name)] = figure
                continue
            drawn = media.encode(function, f"{prefix}{name}", value)
            if drawn is None:
                raise TrainingFailed(
                    f"{function} must return a dict of numbers (or pictures, texts and sounds, as images does), "
                    f"got {kind_of(value)} for {name}; give each number a name"
                )
            self.shown[f"{prefix}{name}"] = drawn
        for name in self.shown.keys() & self.taken:
            raise TrainingFailed(f"{function} gives a picture {name}, as images does; give it another name")
        return figures

    def joined(self) -> dict[str, Any]:
        """Return all predictions in the order of the dataset. Works name by name, so that only one is in memory
        twice."""
        parts = [self._all.pop(number) for number in sorted(self._all)]
        if any(part.keys() != parts[0].keys() for part in parts):
            raise TrainingFailed(f"{self._what} must return the same names for every batch")
        whole: dict[str, Any] = {}
        for name in list(parts[0]) if parts else ():
            values = [part.pop(name) for part in parts]
            kinds = {kind_of(value[:0]) for value in values}
            if len(kinds) > 1:
                raise TrainingFailed(
                    f"{self._what} gives {name} in several forms, {' and '.join(sorted(kinds)[:2])} "
                    "(0: samples); give all one shape, or return a list with one item a sample"
                )
            is_list = isinstance(values[0], list)
            whole[name] = [item for value in values for item in value] if is_list else torch.cat(values)
        return whole


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def _on_host(value: Any) -> Any:
    """Return a copy of a tensor, because it may be a view of a larger one. NumPy has no bfloat16."""
    if not isinstance(value, Tensor):
        return value
    kind = torch.float32 if value.dtype == torch.bfloat16 else value.dtype
    return value.detach().to("cpu", kind, copy=True)

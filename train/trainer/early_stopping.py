"""Early stopping: do the evaluations of a run so far end it?

The answer follows from their figures alone. metrics.jsonl holds these, and a resume cuts it to its step, so no state is
saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from ..config import EarlyStopping
from ..errors import Refused, TrainingFailed, nearest
from ..parallel.world import World
from ..run.best import Aim, aim_of
from ..run.metrics import evaluations
from ..run.run_folder import Run

Score = tuple[int, float | None]
"""The step of an evaluation and its figure. None: the figure was not finite or did not exist."""


class StoppingRule:
    """Ends a run by the scores of its evaluations, the same on every rank."""

    def __init__(self, settings: EarlyStopping, run: Run, world: World) -> None:
        """A collective."""
        self._settings, self._run, self._world, self._aim = settings, run, world, aim_of(settings.metric)
        lines = world.on_first(lambda: evaluations(run))
        self._scores: list[Score] = [(line["step"], line["eval"].get(self._aim.metric)) for line in lines]

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """Add an evaluation, with rank 0's figures. A collective.

        Raises:
            TrainingFailed: the evaluation does not give the metric.
        """
        name, score = self._aim.metric, self._world.broadcast(figures.get(self._aim.metric))
        if score is None:
            raise TrainingFailed(
                f"no evaluation gives {name}, which early_stopping.metric names{nearest(name, figures)} (there "
                f"are: {', '.join(figures)}); choose another: train resume {self._run.name} "
                "--early_stopping.metric NAME"
            )
        self._scores.append((step, score if math.isfinite(score) else None))

    def reason(self) -> str:
        """Return why the run ends after the newest evaluation; '' if it does not."""
        return _reason(self._settings, self._aim, self._scores)


def _reason(settings: EarlyStopping, aim: Aim, scores: Iterable[Score]) -> str:
    count, best = without_improvement(scores, aim, settings.min_delta)
    if count < settings.patience:
        return ""
    since = "" if best is None else f" since step {best[0]} ({best[1]:.6g})"
    return f"early stopping: {aim.metric} did not improve in {count} evaluation{'s' * (count > 1)}{since}"


def check_goes_on(settings: EarlyStopping, run: Run, steps: range) -> None:
    """Check that the evaluations of a run allow these steps (counted from 0), in the run or in a fork of it.

    Raises:
        Refused: they would end the run at once.
    """
    if not settings.metric or not steps:
        return
    step = steps.start
    aim = aim_of(settings.metric)
    scores = [(line["step"], line["eval"].get(aim.metric)) for line in evaluations(run) if line["step"] <= step]
    if why := _reason(settings, aim, scores):
        count, _ = without_improvement(scores, aim, settings.min_delta)
        raise Refused(
            f"{run.name} has no step after step {step}, because it ended by {why}; give "
            f"--early_stopping.patience {count + 1} or more, or another --early_stopping.metric"
        )


def without_improvement(scores: Iterable[Score], aim: Aim, min_delta: float) -> tuple[int, Score | None]:
    """Return how many of the newest scores did not improve by more than `min_delta`, and the last score that did."""
    best, count, found = -math.inf, 0, None
    for step, score in scores:
        value = None if score is None else -score if aim.is_least else score
        if value is not None and value > best + min_delta:
            best, count, found = value, 0, (step, score)
        else:
            count += 1
    return count, found

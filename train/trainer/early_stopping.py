"""Early stopping: do the evaluations of a run so far end it?

The answer follows from their figures alone. metrics.jsonl holds these, and a resume cuts it to its step, so no state is
saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..config import EarlyStopping
from ..errors import Refused
from ..run.best import Aim, aim_of, improvements
from ..run.metrics import history
from ..run.run_folder import Run

Score = tuple[int, float | None]
"""The step of an evaluation and its figure. None: the figure was not finite or did not exist."""


def reason(settings: EarlyStopping, past: Iterable[Mapping[str, Any]]) -> str:
    """Return why a run ends after the newest of these evaluations; '' if it does not."""
    if not settings.metric:
        return ""
    aim = aim_of(settings.metric)
    count, best = without_improvement([(line["step"], line.get(aim.metric)) for line in past], aim, settings.min_delta)
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
    step, aim = steps.start, aim_of(settings.metric)
    past = history(run, step)
    if why := reason(settings, past):
        scores = [(line["step"], line.get(aim.metric)) for line in past]
        count, _ = without_improvement(scores, aim, settings.min_delta)
        raise Refused(
            f"{run.name} has no step after step {step}, because it ended by {why}; give "
            f"--early_stopping.patience {count + 1} or more, or another --early_stopping.metric"
        )


def without_improvement(scores: Iterable[Score], aim: Aim, min_delta: float) -> tuple[int, Score | None]:
    """Return how many of the newest scores did not improve by more than `min_delta`, and the last score that did."""
    count, found, scores = 0, None, [*scores]
    for score, is_better in zip(scores, improvements((one for _, one in scores), aim, min_delta), strict=True):
        count, found = (0, score) if is_better else (count + 1, found)
    return count, found

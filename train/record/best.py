"""Which of a run's checkpoints is the best, by its evaluations. Imports no torch."""

from __future__ import annotations

import contextlib
import dataclasses
import tomllib
from typing import Any

from train.errors import Refused
from train.record.metrics import evaluations
from train.record.store import Run


def pick(metric: str, scores: dict[int, float]) -> int | None:
    """The step with the best score, the later one of equals: the lowest `loss`, the highest of anything else."""
    better = min if metric == "loss" else max
    return better(sorted(scores, reverse=True), key=scores.__getitem__, default=None)


def scores_of(run: Run, metric: str) -> dict[int, float]:
    """The values of a metric by the step after which it was evaluated; without those that are none."""
    scores = {line["step"]: line["eval"].get(metric) for line in evaluations(run)}
    return {step: score for step, score in scores.items() if score is not None}


@dataclasses.dataclass(frozen=True)
class Best:
    """The best checkpoint there is, by a metric of the evaluations."""

    step: int
    metric: str
    value: float
    lost: int | None
    """The step of a better evaluation whose checkpoint was not kept."""

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {"step": self.step, "metric": self.metric, "value": self.value}


def best(run: Run) -> Best | None:
    """The best checkpoint by the metric that checkpoint.best names, else by the loss; None where none was evaluated."""
    metric = "loss"
    with contextlib.suppress(OSError, ValueError):
        content = tomllib.loads((run.folder / "config.toml").read_text(encoding="utf-8"))
        metric = content.get("checkpoint", {}).get("best") or metric
    scores = scores_of(run, metric)
    saved = set(run.steps_saved())
    step, first = pick(metric, {at: score for at, score in scores.items() if at in saved}), pick(metric, scores)
    if step is None or first is None:
        return None
    return Best(step, metric, scores[step], first if scores[first] != scores[step] else None)


def facts(run: Run) -> dict[str, Any]:
    """What run.json has of the checkpoints: their steps, and the best one."""
    found = best(run)
    return {"checkpoints": sorted(run.steps_saved()), "best": found.plain() if found else None}


def checkpoint_named(run: Run, text: str | None) -> int | None:
    """The step that `--checkpoint` means: a number, or `best`; None where nothing was given.

    Raises:
        Refused: it is neither, or no checkpoint was evaluated.
    """
    if text is None:
        return None
    if text == "best":
        found = best(run)
        if found is None:
            saved = ", ".join(map(str, sorted(run.steps_saved()))) or "none"
            raise Refused(f"{run.name} has no evaluation at any of its checkpoints ({saved}); give --checkpoint STEP")
        return found.step
    if not text.isdecimal() or int(text) < 1:
        raise Refused(f"--checkpoint {text}: must be the step of a checkpoint, or best; see: train show {run.name}")
    return int(text)

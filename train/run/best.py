"""Finds the best of a run's checkpoints by its evaluations. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import Refused, is_whole, whole
from ..format import figure
from .metrics import each, evaluations, figures_of, is_evaluation
from .run_folder import Run
from .spec import Spec


class Aim(NamedTuple):
    """What makes a checkpoint the best: the name of a metric, and whether lower is better."""

    metric: str
    is_least: bool


def aim_of(text: str) -> Aim:
    """Parse checkpoint.best: NAME (loss, val.loss, a part loss.ce: the lowest, others: the highest), min:NAME or
    max:NAME."""
    direction, colon, name = text.partition(":")
    if colon and direction in ("min", "max"):
        return Aim(name, direction == "min")
    return Aim(text, "loss" in text.split("."))


_AIMING = ("checkpoint.best", "early_stopping.metric", "schedule.metric")
"""Fields that name a metric, and so may say whether lower is better."""


def aim_among(text: str, configs: Iterable[Mapping[str, Any]]) -> Aim | None:
    """Return what a metric's best value is among runs: as `aim_of` says, or without min: or max: as the fields of these
    runs say. None: they disagree."""
    aim = aim_of(text)
    if aim.metric != text:
        return aim
    named = [aim_of(str(config[field])) for config in configs for field in _AIMING if config.get(field)]
    said = {one for one in named if one.metric == text}
    return None if len(said) > 1 else next(iter(said), aim)


def values_of(run: Run, is_script: bool, until: float = math.inf) -> dict[str, list[float]]:
    """Return the finite values of each metric of the evaluations. Of a script also those of its other figures.

    Args:
        until: The last step that counts.
    """
    found: dict[str, list[float]] = {}
    others: dict[str, list[float]] = {}
    for line in each(run) if is_script else evaluations(run):
        if line["step"] > until:
            continue
        for name, value in figures_of(line).items():
            if value is not None:
                (found if is_evaluation(line) else others).setdefault(name, []).append(value)
    return others | found


def bests(
    run: Run, is_script: bool, configs: Sequence[Mapping[str, Any]], *, texts: Iterable[str] = ()
) -> dict[str, float]:
    """Return the best value of each metric of a run, and of those that min:NAME and max:NAME in `texts` name.

    Args:
        configs: The fields of this run, and of the runs with which it is compared. They say whether lower is better.
    """
    values, found = values_of(run, is_script), dict[str, float]()
    for text in (*values, *texts):
        aim = aim_among(text, configs) or aim_among(text, configs[:1]) or aim_of(text)
        if aim.metric in values:
            found[text] = (min if aim.is_least else max)(values[aim.metric])
    return found


def improvements(scores: Iterable[float | None], aim: Aim, min_delta: float = 0.0) -> Iterator[bool]:
    """Yield for each score whether it is better than all before it by more than `min_delta`. None is not better."""
    best = -math.inf
    for score in scores:
        value = None if score is None else -score if aim.is_least else score
        is_better = value is not None and value > best + min_delta
        if value is not None and is_better:
            best = value
        yield is_better


def ranked(aim: Aim, scores: dict[int, float]) -> list[int]:
    """Return the steps, the best score first; of equal scores the latest first."""
    return sorted(scores, key=lambda step: (scores[step] if aim.is_least else -scores[step], -step))


def scores_of(run: Run, text: str) -> tuple[Aim, dict[int, float]]:
    """Return the aim that checkpoint.best means in this run, and the finite values of its metric by step.

    If the metric was never measured, the aim is a loss.
    """
    lines, aim = evaluations(run), aim_of(text)
    if not any(aim.metric in line["eval"] for line in lines):
        losses = [name for line in lines for name in line["eval"] if aim_of(name).is_least]
        aim = aim_of(losses[0] if losses else "loss")
    scores = {line["step"]: line["eval"].get(aim.metric) for line in lines}
    return aim, {step: score for step, score in scores.items() if score is not None}


class Best(NamedTuple):
    """The best of the existing checkpoints, by a metric of the evaluations."""

    step: int
    metric: str
    value: float
    lost: tuple[int, float] | None = None
    """Step and value of a better evaluation whose checkpoint was not kept."""

    @property
    def warning(self) -> str:
        """A line about the better evaluation; '' if there was none."""
        better = "step {} was better ({metric} {}) but has no checkpoint; next time give --checkpoint.best {metric}"
        return better.format(self.lost[0], figure(self.lost[1]), metric=self.metric) if self.lost else ""


def best(run: Run, by: str) -> Best | None:
    """Return the best checkpoint by a value of checkpoint.best ('': by the loss); None if none was evaluated."""
    aim, scores = scores_of(run, by or "loss")
    saved = set(run.steps_saved())
    order = ranked(aim, scores)
    step = next((at for at in order if at in saved), None)
    if step is None:
        return None
    lost = (order[0], scores[order[0]]) if scores[order[0]] != scores[step] else None
    return Best(step, aim.metric, scores[step], lost)


def best_steps(run: Run, by: str, count: int) -> dict[int, float]:
    """Return this many of the best checkpoints, best first, with their values; `by` as in `best`."""
    aim, scores = scores_of(run, by or "loss")
    saved = set(run.steps_saved())
    steps = [step for step in ranked(aim, scores) if step in saved]
    return {step: scores[step] for step in steps[:count]}


def facts(run: Run, by: str) -> dict[str, Any]:
    """Return the checkpoints in the form of run.json: their steps, and the best one; `by` as in `best`."""
    found = best(run, by)
    shown = {"step": found.step, "metric": found.metric, "value": found.value} if found else None
    return {"checkpoints": sorted(run.steps_saved()), "best": shown}


AVERAGE = "ema"
"""Names the average of the weights, among the weights of a run and in the names of its metrics."""


class Chosen(NamedTuple):
    """The checkpoint that `--checkpoint` means."""

    step: int | None = None
    """None: the newest one."""
    metric: str = ""
    """The metric by which it is the best; '': it was not chosen as the best."""
    is_averaged: bool | None = None
    """Whether that metric was measured with the average of the weights; None: the run keeps none."""

    def weights(self, asked: str, tell: Callable[[str], None], what: str = "") -> str:
        """Return the weights to use: those that the user has asked for, else those that the metric was measured with.

        Args:
            asked: AVERAGE, another name, or '': not given.
            tell: called with a warning if the metric was measured with others than asked for.
            what: Begins a line about the weights of the best checkpoint; '': no line.
        """
        which = asked or (AVERAGE if self.is_averaged else "")
        if self.metric and what:
            tell(f"{what}: the {'averaged ' * (which == AVERAGE)}weights after step {self.step}{self.said}")
        if asked and self.is_averaged not in (None, asked == AVERAGE):
            measured = "average of the weights" if self.is_averaged else "weights of the model"
            tell(f"warning: step {self.step} is the best by {self.metric}, which was measured with the {measured}")
        return which

    @property
    def said(self) -> str:
        """The end of a line about the weights; '' if they are not the best."""
        return f", the best by {self.metric}" if self.metric else ""


def checkpoint_named(run: Run, spec: Spec, text: str | None, *, tell: Callable[[str], None]) -> Chosen:
    """Return the checkpoint that `--checkpoint` means, a number or `best`.

    Args:
        text: None: it was not given.
        tell: called with a warning if a better evaluation has no checkpoint.

    Raises:
        Refused: it is neither, there is no checkpoint of that step, or no checkpoint was evaluated.
    """
    if text is None:
        return Chosen()
    saved = ", ".join(map(str, sorted(run.steps_saved()))) or "none"
    if text == "best":
        found = best(run, spec.best_by)
        if found is None:
            raise Refused(f"no checkpoint of {run.name} was evaluated (there are: {saved}); give --checkpoint STEP")
        if found.warning:
            tell(f"warning: {found.warning}")
        is_averaged = found.metric.startswith(f"{AVERAGE}.")
        return Chosen(found.step, found.metric, None if spec.config.get("ema.decay") is None else is_averaged)
    if not is_whole(text) or whole(text) < 1:
        raise Refused(f"--checkpoint {text}: give the step of a checkpoint, or best; see: train show {run.name}")
    if whole(text) not in run.steps_saved():
        raise Refused(f"{run.name} has no checkpoint of step {whole(text)}; there are: {saved}")
    return Chosen(whole(text))

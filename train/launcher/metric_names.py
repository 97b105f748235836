"""Checks the config fields that name a metric of the evaluations."""

from __future__ import annotations

from collections.abc import Collection

from .. import config as configuration
from ..config import Config, decays
from ..errors import Refused, nearest
from ..run import best
from ..run.metrics import evaluations
from ..tasks import Task
from .case import Case, Kind

_METRICS = ("checkpoint.best", "early_stopping.metric", "schedule.metric")
"""Fields that name a metric of the evaluations."""


def check_evaluates(case: Case) -> None:
    """Check that a run whose rules follow a metric evaluates before its end."""
    config, followed = case.config, followed_metrics(case.config)
    if followed and not (config.eval.every_epochs or config.eval.every_steps):
        raise Refused(f"--{next(iter(followed))} needs evaluations before the end; give --eval.every_epochs")


def check(case: Case) -> None:
    """Check that the evaluations give the metrics that fields name, as far as that is known."""
    for field in metrics_of(case.config):
        check_metric(field, case.config, case.task, case.eval_sets)
        if case.kind is Kind.RESUME and field in case.asked:
            known = {name: None for line in evaluations(case.of.run) for name in line["eval"]}
            check_metric(field, case.config, case.task, case.eval_sets, known)


def metrics_of(config: Config) -> list[str]:
    """Return the fields in use that name a metric of the evaluations."""
    flat = configuration.to_flat(config)
    has_use = {"schedule.metric": decays.of(config.schedule.decay).follows_evaluations}
    return [field for field in _METRICS if flat[field] and has_use.get(field, True)]


def followed_metrics(config: Config) -> dict[str, str]:
    """Map those of `metrics_of` without whose metric a run fails to their text."""
    flat = configuration.to_flat(config)
    return {field: flat[field] for field in metrics_of(config) if field != "checkpoint.best"}


def check_metric(
    field: str, config: Config, task: Task, eval_sets: Collection[str], known: Collection[str] = ()
) -> None:
    """Check that evaluations give the metric that a field names, as far as that is known.

    Args:
        field: One of `metrics_of`.
        known: Metrics of the run's evaluations so far; empty before the first evaluation.

    Raises:
        Refused: they do not.
    """
    text = configuration.to_flat(config)[field]
    metric = best.aim_of(text).metric
    if not eval_sets:
        why = f"datasets() in {task.file} returns None for the evaluation set"
        raise Refused(f"--{field} {text} needs evaluations, but {why}; leave out --{field}")
    weights = ("", "ema.") if config.ema.decay is not None else ("",)
    prefixes = [which + (f"{name}." if name else "") for which in weights for name in eval_sets]
    is_open = not known and (task.metrics is not None or task.compute_metrics is not None)
    if is_open and metric and any(map(metric.startswith, prefixes)):
        return  # only the first evaluation shows which names exist
    if not known and task.loss is not None and any(metric.startswith(f"{prefix}loss.") for prefix in prefixes):
        return  # a part of the loss
    known = known or [f"{prefix}loss" for prefix in prefixes if task.loss is not None]
    if metric not in known:
        likely = {prefix + metric.rpartition(".")[2] for prefix in prefixes if is_open and metric}
        names = nearest(metric, likely.union(known), otherwise=f"; there are: {', '.join(known)}")
        raise Refused(f"--{field} {text}: no evaluation gives {metric or 'a metric without a name'}{names}")

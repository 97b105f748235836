"""The curves of a run for the page: what it has logged and evaluated, by step and by time of training."""

from __future__ import annotations

import bisect
import functools
import itertools
from typing import Any

from markupsafe import Markup

from ..monitor.status import RunStatus
from ..run import metrics
from ..views import cell
from .look import Place, key_of

_MACHINE = (*metrics.Speed.__annotations__, "lr", "grad_norm")
"""Figures of how training runs, not of what it has learned. Folded on the page."""
_MOST = 40
"""Maximum number of curves of a run."""
_MOST_POINTS = 2000
"""Maximum number of evaluations of a curve."""
_LONGEST = 1e12
"""Maximum of a time in seconds. A damaged file may contain any number."""
_EVERY = 10.0
"""Seconds for which the evaluations of a long file are used."""


def mark(one: RunStatus) -> str:
    """Return what changes with the curves of a run."""
    try:
        found = one.run.metrics.stat()
    except OSError:
        return "-"
    return f"{found.st_size}-{found.st_mtime_ns}-{len(one.record['attempts'])}"


def of(place: Place, one: RunStatus) -> dict[str, Any]:
    """Return the curves of a run: steps, times, and figures by name, of training (`line`) and evaluations (`eval`)."""
    look, t = place.look, place.t
    lines = metrics.sampled(one.run)
    evaluated = [line for line in lines if metrics.is_evaluation(line)]
    if is_sampled := one.run.metrics.exists() and one.run.metrics.stat().st_size > metrics.WHOLE:
        evaluated = look.kept(key_of("eval", one), _EVERY, lambda: metrics.evaluations(one.run))
    trained: list[Any] = [line for line in lines if not metrics.is_evaluation(line)]
    evaluated = evaluated[:: len(evaluated) // _MOST_POINTS + 1]
    steps, times = [0], [0.0]
    for line in trained:
        took = (line.get("step_time") or 0.0) * max(line["step"] - steps[-1], 0)
        steps.append(max(line["step"], steps[-1]))
        times.append(min(times[-1] + took, _LONGEST))
    at = functools.partial(_time_at, steps, times)
    tables = {
        kind: _table([(line["step"], at(line["step"]), metrics.figures_of(line)) for line in found])
        for kind, found in (("line", trained), ("eval", evaluated))
    }
    is_timed, more = times[-1] > 0 or not lines, sum(table["more"] for table in tables.values())
    notes = {t("sampled"): is_sampled, t.count("more_curves", more): more, t("no_times", one.name): not is_timed}
    said = [text for text, holds in notes.items() if holds]
    return {"name": one.name, "notes": said, "is_timed": is_timed, "marks": _restarts(one), **tables}


def machine_names() -> list[str]:
    """Return the figures that are folded."""
    return [*_MACHINE]


def svg(one: RunStatus) -> Markup:
    """Return the curve of the loss as the notebook's cell draws it."""
    return Markup(cell.curve(cell.losses(metrics.sampled(one.run))))


def _restarts(one: RunStatus) -> list[tuple[int, bool]]:
    """Return after which steps a later attempt continued, and whether the one before had died."""
    attempts = one.record["attempts"]
    return [
        (after["from_step"] or 0, before["end"] in (None, "died"))
        for before, after in itertools.pairwise(attempts)
        if after.get("ready")
    ]


def _time_at(steps: list[int], times: list[float], step: int) -> float:
    """Return the seconds of training until a step, given those until other steps."""
    after = bisect.bisect_right(steps, step)
    if not 0 < after < len(steps):
        return times[after - 1]
    first, began = steps[after - 1], times[after - 1]
    return began + (times[after] - began) * (step - first) / (steps[after] - first)


def _table(lines: list[tuple[int, float, dict[str, float | None]]]) -> dict[str, Any]:
    names = dict.fromkeys(name for _, _, figures in lines for name in figures)
    return {
        "step": [step for step, _, _ in lines],
        "time": [round(now, 2) for _, now, _ in lines],
        "figures": {name: [_short(figures.get(name)) for _, _, figures in lines] for name in [*names][:_MOST]},
        "more": max(len(names) - _MOST, 0),
    }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")

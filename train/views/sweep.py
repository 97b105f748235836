"""The table that compares the trials of a sweep, or other runs by their fields: `train ls SWEEP`, `train ls --by`."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from .. import programs, screen
from ..errors import Refused, nearest
from ..format import figure
from ..monitor.status import RunStatus
from ..run import states
from ..run.run_folder import Run
from ..sweeps import kept
from ..sweeps.kept import Metric, Row, Trial, rows
from .listing import value
from .settings import shown

HEADS = ("n", "of", "mean", "deviation", "state", "best")
"""Columns of the CSV after the parameters."""


def of_sweep(run: Run, metric: str = "") -> tuple[list[Row], Metric]:
    """Return the rows of a sweep, and by what they are compared.

    Args:
        metric: Another one than the sweep's; '': the sweep's.

    Raises:
        Refused: the run is no sweep.
    """
    sweep = kept.read(run)
    sweep = dataclasses.replace(sweep, by=metric or sweep.by)
    found = Metric.read(sweep.by)
    return rows(kept.look_at_all(run, sweep), [*sweep.space.repeat], found), found


def compared(found: Sequence[RunStatus], fields: Sequence[str], metric: Metric) -> list[Row]:
    """Return the rows of runs with equal values of these fields, the best mean first.

    Raises:
        Refused: no run has such a field.
    """
    trials = []
    for one in found:
        values = {name: value(one, name) for name in fields}
        measured = metric.of(one.run, one.record) if one.state == states.FINISHED else None
        parameters = {name: shown(given) for name, given in values.items()}
        trials.append(Trial(one.name, parameters, one.state, reason=one.reason, record=one.record, value=measured))
    for name in fields:
        if found and all(one.parameters[name] == "none" for one in trials):
            known = {field for one in found for field in one.config}
            raise Refused(f"--by {name}: no run here has this field{nearest(name, known, otherwise='')}")
    return rows(trials, (), metric)


def _states(row: Row) -> str:
    """Return the states of a row's trials: one for all, the name of a single other one, or counts."""
    counts = Counter(one.said for one in row.trials)
    if len(counts) == 1:
        return row.trials[0].said
    others = [one for one in row.trials if one.state != states.FINISHED]
    if len(others) == 1:
        return f"{others[0].name} {others[0].said}"
    return ", ".join(f"{count} {state}" for state, count in counts.items())


def _best(row: Row, metric: Metric) -> str:
    best = row.best(metric)
    return best.name if best is not None else ""


def table(found: Sequence[Row], metric: Metric) -> str:
    """Return the table, and below it the best run and the command that continues it."""
    parameters = [*found[0].parameters] if found else []
    title = f"last {metric.name}" if metric.is_last else metric.name
    lines = [[text.upper() for text in (*parameters, "n", title, "state", "best")]]
    for row in found:
        mean, spread = row.mean, row.deviation
        measured = "-" if mean is None else figure(mean) + (f" ± {figure(spread)}" if spread is not None else "")
        count = f"{len(row.values)}/{len(row.trials)}"
        lines.append([*row.parameters.values(), count, measured, _states(row), _best(row, metric) or "-"])
    text = screen.table(
        [[screen.printable(cell) for cell in line] for line in lines], screen.width(sys.stdout), spare=()
    )
    return "\n".join([text, *_below(found, metric)])


def _below(found: Sequence[Row], metric: Metric) -> list[str]:
    """Return the lines below the table: the best run, or why there is none."""
    best = found[0].best(metric) if found else None
    if best is not None and best.record is not None:
        name = shlex.quote(best.name)
        program = programs.of_record(best.record)
        way = f"to look at it: train show {name}"
        if "fork" not in program.lacks:
            more = " --epochs N" if program.has_fields else ""
            way = f"to continue it: train fork {name} --name NEW{more}"
        is_over = best.state == states.FINISHED
        is_over &= all(one.has_reached_rung or one.state == kept.GONE for row in found for one in row.trials)
        return [f"the best{'' if is_over else ' so far'}: {best.name}; {way}"]
    ended = [one.record for row in found for one in row.trials if one.record and one.state == states.FINISHED]
    if not ended:
        return []
    there = sorted({name for record in ended for part in _measures(record) for name in part} - {metric.name})
    return [f"no run has the metric {metric.name}; there are: {', '.join(there) or 'none'}; choose one by --metric"]


def _measures(record: Any) -> list[dict[str, Any]]:
    return [record.get("metrics") or {}, record.get("last_figures") or {}]


def as_json(found: Sequence[Row], metric: Metric) -> list[dict[str, Any]]:
    """Return the rows as JSON has them."""
    return [
        {
            "parameters": row.parameters, "n": len(row.values), "of": len(row.trials), "metric": metric.name,
            "mean": row.mean, "deviation": row.deviation, "best": _best(row, metric) or None,
            "trials": {
                one.name: {"state": one.state, "rung": one.rung or None, "value": one.value, **one.parameters}
                for one in row.trials
            },
        }
        for row in found
    ]  # fmt: skip


def as_csv(found: Sequence[Row], metric: Metric) -> list[list[Any]]:
    """Return the lines of a CSV file."""
    parameters = [*found[0].parameters] if found else []
    lines: list[list[Any]] = [[*parameters, *HEADS]]
    for row in found:
        figures = [len(row.values), len(row.trials), row.mean, row.deviation]
        lines.append([*row.parameters.values(), *figures, _states(row), _best(row, metric)])
    return lines

"""`train plot`: draw loss, metrics, learning rate, throughput and data wait over the steps, as far as known."""

from __future__ import annotations

import bisect
import dataclasses
import math
import statistics
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import screen
from ..errors import Refused, nearest, shortened
from ..monitor.status import RunStatus, here
from ..run import metrics
from ..run.durable import check_target, published
from ..run.run_folder import Run
from ..sweeps.kept import deviation_of
from . import listing, settings

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Figures = NDArray[Any]

LOSS, LR, SPEED, WAIT, STEP = "loss", "lr", "samples_per_s", "data_wait", "step_time"
NORM = "grad_norm"
_TRAINING = (LOSS, LR, SPEED, WAIT, STEP, NORM)
HIGHEST = 1e100
"""Larger values overflow matplotlib's axes. A loss in single precision is infinite long before."""
SUFFIXES = (".png", ".svg", ".pdf")
_PLAIN: Any = {"text.parse_math": False}
"""Settings of matplotlib: a $ in a name is a $."""

TITLES = {
    LOSS: "loss", LR: "learning rate", SPEED: "samples / s", WAIT: "data wait, % of a step",
    STEP: "a step, ms", NORM: "norm of gradients",
}  # fmt: skip
_FROM_ZERO = (SPEED, WAIT, STEP)
_FEW = 10
"""Maximum number of runs with distinct colours. More runs get shades of one scale."""
_MANY = 200
"""Points above which training values are drawn thin, and their mean over 1/50 of the points thick; and above which
points of a metric have no dots."""
_MOST = 4000
"""Maximum number of points of a line. Longer lines show the lowest and highest point of each stretch."""
MOST_MEASURES = 12
"""Maximum number of evaluation metrics that are drawn. A picture has at most 65536 pixels."""
_LABEL = 70
"""Maximum number of characters of an axis label."""


@dataclasses.dataclass
class Curves:
    """The metrics of one run, and how they are drawn. A missing value is nan, which leaves a gap.

    Arrays take eight bytes per value; lists of Python objects would take a hundred times as much.
    """

    name: str
    colour: Any
    verdict: str = ""
    """The advice about waiting for data, if training gave one."""
    own: str = ""
    """How the configuration differs from the other runs."""
    steps: array[float] = dataclasses.field(default_factory=lambda: array("d"))
    """Steps of the training lines."""
    training: dict[str, array[float]] = dataclasses.field(
        default_factory=lambda: {name: array("d") for name in _TRAINING}
    )
    """Maps LOSS, LR, SPEED, WAIT, STEP and NORM to their values, in the units of metrics.Training."""
    _last: dict[str, int] = dataclasses.field(default_factory=dict)
    """Maps a name in `training` to the step of its last value."""
    evaluations: dict[str, tuple[array[float], array[float]]] = dataclasses.field(default_factory=dict)
    """Maps a metric of the evaluations, or another figure of a script, to its steps and values."""

    spreads: dict[str, tuple[list[float], list[float], list[float]]] = dataclasses.field(default_factory=dict)
    """Of the mean of several runs: maps a panel to its steps, and to the mean less and plus the deviation."""

    def read(self, run: Run) -> Curves:
        """Read the lines of metrics.jsonl. Raises OSError if the file cannot be read."""
        for line in metrics.each(run):
            figures = metrics.figures_of(line)
            if not metrics.is_evaluation(line):
                self._add_training(line)
                figures = {name: value for name, value in figures.items() if not _is_of_engine(name)}
            for name, value in figures.items():
                _add(self.evaluations.setdefault(screen.printable(name), (array("d"), array("d"))), line["step"], value)
        return self

    def _add_training(self, line: Mapping[str, Any]) -> None:
        given = self.training.keys() & line.keys()
        if not given:
            return
        self._forget(line["step"], {name for name in given if self._last.get(name, 0) > line["step"]})
        self._last |= dict.fromkeys(given, line["step"])
        at = bisect.bisect_right(self.steps, line["step"])
        if not at or self.steps[at - 1] < line["step"]:
            self.steps.insert(at, line["step"])
            for column in self.training.values():
                column.insert(at, math.nan)
            at += 1
        for name in given:
            self.training[name][at - 1] = _drawable(line[name])

    def _forget(self, step: int, names: set[str]) -> None:
        """Remove values after a step: a script went back to an earlier checkpoint, and writes them again."""
        for name in names:
            for row in range(bisect.bisect_right(self.steps, step), len(self.steps)):
                self.training[name][row] = math.nan
        while names and self.steps and self.steps[-1] > step and self._is_empty(-1):
            for column in (self.steps, *self.training.values()):
                column.pop()

    def _is_empty(self, row: int) -> bool:
        return all(math.isnan(column[row]) for column in self.training.values())

    @property
    def panels(self) -> list[str]:
        """The panels with values, in order: the loss, metrics as `eval NAME`, other values of training lines."""
        known = {name for name, values in self.training.items() if any(map(math.isfinite, values))}
        known -= {WAIT} if STEP not in known else set()
        known |= {LOSS} & self.evaluations.keys()
        measured = [f"eval {name}" for name in measures([self])]
        return [*({LOSS} & known), *measured, *(name for name in (NORM, LR, SPEED, STEP, WAIT) if name in known)]

    @property
    def waiting(self) -> float:
        """Share of the training time spent waiting for data, from 0 to 1."""
        import numpy as np

        # a line covers the steps since the previous line
        made = np.diff(np.asarray(self.steps), prepend=0.0).clip(min=0.0)
        waited, elapsed = (float(np.nansum(np.asarray(self.training[name]) * made)) for name in (WAIT, STEP))
        return min(max(waited / max(elapsed, 1e-12), 0.0), 1.0)

    def values(self, panel: str) -> Figures:
        """Return the values of the training lines for a panel."""
        import numpy as np

        values = np.asarray(self.training[panel])
        if panel == WAIT:  # as a share of the step
            return 100 * values / np.maximum(np.asarray(self.training[STEP]), 1e-12)
        return 1000 * values if panel == STEP else values


def _is_of_engine(name: str) -> bool:
    return name in metrics.Training.__annotations__ or name.startswith("loss.")


def _add(curve: tuple[array[float], array[float]], step: int, value: Any) -> None:
    """Add a point. A step that a script makes again replaces the points from this step on."""
    steps, values = curve
    while steps and steps[-1] >= step:
        steps.pop()
        values.pop()
    steps.append(step)
    values.append(_drawable(value))


def _drawable(value: Any) -> float:
    return math.nan if value is None or abs(value) >= HIGHEST else float(value)


def _averaged(name: str, colour: Any, members: list[Curves]) -> Curves:
    """Return the mean of some runs at the steps that all of them have, and its spread."""
    made = Curves(name, colour)
    made.steps = array("d", sorted(set.intersection(*(set(one.steps) for one in members))))
    for key in _TRAINING:
        pairs = [(one.steps, one.training[key]) for one in members]
        made.training[key] = _mean(made, key if key == LOSS else "", pairs)[1]
    for key in members[0].evaluations:
        if all(key in one.evaluations for one in members):
            panel = f"eval {key}" if key != LOSS else ""
            made.evaluations[key] = _mean(made, panel, [one.evaluations[key] for one in members])
    return made


def _mean(
    curves: Curves, panel: str, pairs: list[tuple[array[float], array[float]]]
) -> tuple[array[float], array[float]]:
    """Return the common steps of some lines and their mean there. Notes the spread of a panel ('': of none)."""
    known = [dict(zip(steps, values, strict=True)) for steps, values in pairs]
    steps = sorted(set.intersection(*map(set, known)))
    means = [statistics.fmean(line[step] for line in known) for step in steps]
    if panel and len(known) > 1:
        ends = [deviation_of([line[step] for line in known]) or 0.0 for step in steps]
        lows, highs = ([mean + sign * end for mean, end in zip(means, ends, strict=True)] for sign in (-1, 1))
        curves.spreads[panel] = steps, lows, highs
    return array("d", steps), array("d", means)


def plot(runs: list[Run], target: Path, by: Sequence[str] = ()) -> list[str]:
    """Draw the runs into a file. Return the advice of each run about waiting for data; '': it got none.

    Args:
        by: As in `picture`.

    Raises:
        Refused: the target cannot be written, or no run has metrics yet.
    """
    check_target(target, SUFFIXES)
    figure, advice = picture(runs, by)
    from matplotlib import rc_context

    with rc_context(_PLAIN), published(target) as partial:
        figure.savefig(partial, dpi=120)
    return advice


def picture(runs: list[Run], by: Sequence[str] = ()) -> tuple[Any, list[str]]:
    """Draw the runs into one matplotlib Figure. Also return the advice of each run.

    Args:
        by: Fields. The mean and the deviation of the runs with equal values of them are drawn; (): each run.

    Raises:
        Refused: no run has metrics yet.
    """
    found = [here(run) for run in runs]
    own = settings.differing([(one.spec, one.record.get("world_size")) for one in found])
    advice = [one.record.get("data_wait") or "" for one in found]
    drawn = []
    for number, one in enumerate(found):
        name = screen.printable(one.name)
        curves = Curves(name, _colour(number, len(runs)), screen.printable(advice[number]), own[number])
        drawn.append(curves.read(one.run))
    with_lines = [(one, curves) for one, curves in zip(found, drawn, strict=True) if curves.panels]
    for one, curves in zip(found, drawn, strict=True):
        if not curves.panels and not (with_lines and one.record.get("trial_of")):
            raise Refused(f"{curves.name} has no metrics to draw yet; {one.program.get_figures(curves.name)}")
        if not curves.panels:
            screen.remark(f"{curves.name} has no metrics yet, so it is left out")
    found, drawn = [one for one, _ in with_lines], [curves for _, curves in with_lines]

    if by:
        drawn = _by(found, drawn, by)
    from matplotlib import rc_context

    with rc_context(_PLAIN):
        return _figure(drawn), advice


def _by(found: list[RunStatus], drawn: list[Curves], fields: Sequence[str]) -> list[Curves]:
    """Return the mean of the runs with equal values of these fields. Raises Refused if no run has one of them."""
    groups: dict[tuple[str, ...], list[Curves]] = {}
    given = [tuple(listing.value(one, field) for field in fields) for one in found]
    for number, field in enumerate(fields):
        if all(values[number] is None for values in given):
            known = {name for one in found for name in one.config}
            raise Refused(f"--by {field}: no run here has this field{nearest(field, known)}")
    for values, curves in zip(given, drawn, strict=True):
        groups.setdefault(tuple(map(settings.shown, values)), []).append(curves)
    made = []
    for number, (values, members) in enumerate(groups.items()):
        label = " ".join(f"{field}={text}" for field, text in zip(fields, values, strict=True))
        of = f"  mean of {len(members)}" if len(members) > 1 else ""
        made.append(_averaged(screen.printable(label) + of, _colour(number, len(groups)), members))
    return made


def _colour(number: int, runs: int) -> Any:
    if runs <= _FEW:
        return f"C{number}"
    import matplotlib

    return matplotlib.colormaps["turbo"](0.05 + 0.9 * number / (runs - 1))


def measures(drawn: Iterable[Curves]) -> list[str]:
    """Return the metrics of the evaluations of these runs, without the loss."""
    return sorted({name for curves in drawn for name in curves.evaluations if name != LOSS})


def _figure(drawn: list[Curves]) -> Any:
    """Draw the panels above each other, over the same steps. The title is the run's name or a legend of the runs."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    measured = measures(drawn)
    known = {panel for curves in drawn for panel in curves.panels}
    # an accuracy beside the loss when the task has one
    panels = [LOSS, *(f"eval {name}" for name in measured[:MOST_MEASURES]), NORM, LR, SPEED, WAIT]
    panels = [panel for panel in panels if panel in known] or [STEP]
    labels = [f"{curves.name}   {curves.own}".rstrip() for curves in drawn]
    columns = 1 if max(map(len, labels)) > 45 else 2 if max(map(len, labels)) > 25 else 3
    size = (9, 2.3 * len(panels) + 0.6 + 0.19 * math.ceil(len(drawn) / columns))
    figure = Figure(size, layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, panel in zip(axes, panels, strict=True):
        draw(axis, drawn, panel)
    left_out = len(measured) - MOST_MEASURES
    axes[-1].set_xlabel("step" if left_out <= 0 else f"step\n{left_out} more metrics of evaluations are not drawn")
    if len(drawn) == 1:
        figure.suptitle(drawn[0].name, fontsize=11)
    else:
        handles = [Line2D([], [], color=curves.colour, linewidth=2.5) for curves in drawn]
        figure.legend(handles, labels, loc="outside upper left", ncols=columns, fontsize=8.5, frameon=False)
    figure.align_ylabels(axes)
    return figure


def draw(axis: Any, drawn: list[Curves], panel: str) -> None:
    """Draw one panel: a value of the training lines, or, as `eval NAME`, a metric of the evaluations."""
    measure = panel.removeprefix("eval ") if panel.startswith("eval ") else None
    for curves in drawn:
        if measure is None:
            _draw_training(axis, curves, panel, is_alone=len(drawn) == 1)
        elif measure in curves.evaluations:  # otherwise only another run has this metric
            steps, values = curves.evaluations[measure]
            dots = {"marker": "o", "markersize": 3} if len(steps) <= _MANY else {"linewidth": 1.0}
            axis.plot(*_thinned(steps, values), color=curves.colour, **dots)
        if panel in curves.spreads:
            axis.fill_between(*curves.spreads[panel], color=curves.colour, alpha=0.15, linewidth=0)
    axis.set_ylabel(shortened(measure, _LABEL) if measure is not None else TITLES[panel], fontsize=9)
    axis.grid(alpha=0.25)
    axis.margins(x=0.02)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    if panel in _FROM_ZERO:
        axis.set_ylim(bottom=0)
    if panel == WAIT:
        said = [f"{_whose(curves, drawn)}{curves.verdict.split(' (')[0]}" for curves in drawn if curves.verdict]
        axis.set_title("\n".join(said), fontsize=8, loc="left")
    if panel in (LOSS, WAIT):
        _explain(axis, drawn, panel)


def _whose(curves: Curves, drawn: list[Curves]) -> str:
    return f"{curves.name}  " if len(drawn) > 1 else ""


def _explain(axis: Any, drawn: list[Curves], panel: str) -> None:
    """Draw a legend inside a panel: the meaning of lines and dots, or how long each run waited."""
    from matplotlib.lines import Line2D

    if panel == LOSS:
        handles = [Line2D([], [], color="grey"), Line2D([], [], color="grey", marker="o", markersize=3)]
        labels = ["training", "evaluation"][: 1 + any(LOSS in curves.evaluations for curves in drawn)]
    else:
        handles = [Line2D([], [], color=curves.colour) for curves in drawn[:_FEW]]
        labels = [f"{_whose(curves, drawn)}{curves.waiting:.0%} of the time" for curves in drawn[:_FEW]]
    axis.legend(handles[: len(labels)], labels, fontsize=8, frameon=False)


def _draw_training(axis: Any, curves: Curves, panel: str, is_alone: bool) -> None:
    """Draw a value of the training lines; for the loss also that of the evaluations."""
    steps: Any = curves.steps
    values = curves.values(panel)
    is_noisy = panel != LR and len(values) > _MANY
    if is_noisy:
        axis.plot(*_thinned(steps, values), color=curves.colour, alpha=0.3 if is_alone else 0.15, linewidth=0.7)
        steps, values = _means(steps, values)
    strength = 0.55 if panel == LOSS and is_alone and not is_noisy else 1
    axis.plot(*_thinned(steps, values), color=curves.colour, alpha=strength, linewidth=1.3)
    if panel == LOSS and LOSS in curves.evaluations:
        measure = _thinned(*curves.evaluations[LOSS])
        axis.plot(*measure, "-" if is_alone else "--", marker="o", color=curves.colour, markersize=3, linewidth=1)


def _means(steps: Any, values: Figures) -> tuple[Figures, Figures]:
    """Return the mean around each point, over 1/50 of all points; fewer at both ends."""
    import numpy as np

    half = max(len(values) // 100, 1)
    sums, counts = np.insert(np.cumsum(np.nan_to_num(values)), 0, 0), np.insert(np.cumsum(np.isfinite(values)), 0, 0)
    low = np.maximum(np.arange(len(values)) - half, 0)
    high = np.minimum(np.arange(len(values)) + half + 1, len(values))
    with np.errstate(invalid="ignore", divide="ignore"):
        return steps, (sums[high] - sums[low]) / (counts[high] - counts[low])


def _thinned(steps: Any, values: Any) -> tuple[Figures, Figures]:
    """Reduce the points to what can be seen: the lowest and highest of each stretch, in their order."""
    import numpy as np

    steps, values = np.asarray(steps), np.asarray(values)
    if len(values) <= _MOST:
        return steps, values
    size = -(-2 * len(values) // _MOST)
    begins = np.arange(0, len(values), size)
    stretches = np.pad(values, (0, len(begins) * size - len(values)), constant_values=np.nan).reshape(-1, size)
    is_gap = np.isnan(stretches)
    lowest = begins + np.where(is_gap, np.inf, stretches).argmin(axis=1)
    highest = begins + np.where(is_gap, -np.inf, stretches).argmax(axis=1)
    kept = np.unique([lowest, highest])
    return steps[kept], values[kept]

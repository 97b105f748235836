"""Pictures of runs: loss, learning rate, throughput and data wait over the steps."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from train.errors import Refused, one_line
from train.record import metrics
from train.record.metrics import Evaluation, Training
from train.record.store import Run

SUFFIXES = (".png", ".svg", ".pdf")


_STYLES = ("-", "--", ":", "-.")
"""Of a task's metrics, in one colour a run."""
_TITLES = {
    "loss": "loss", "metrics": "metrics", "lr": "learning rate", "samples_per_s": "samples / s",
    "data_wait": "waiting for data,\n% of a step",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Curves:
    """The lines of one run, and how it is drawn."""

    name: str
    training: list[Training]
    evaluations: list[Evaluation]
    colour: str
    prefix: str
    """Of its labels, where there are several runs."""


def plot(runs: list[Run], target: Path) -> None:
    """Draw the runs into one picture.

    Raises:
        Refused: the suffix is unknown, the folder is missing, or no run has metrics yet.
    """
    if target.suffix not in SUFFIXES:
        raise Refused(f"--to {target}: must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    if not target.absolute().parent.is_dir():
        raise Refused(f"--to {target}: there is no folder {target.parent}; make it first")
    drawn = [
        _Curves(run.name, *metrics.read(run), f"C{number % 10}", f"{run.name}  " if len(runs) > 1 else "")
        for number, run in enumerate(runs)
    ]
    empty = [curves.name for curves in drawn if not curves.training]
    if empty:
        raise Refused(f"{', '.join(empty)} has no metrics to plot yet; see: train logs {empty[0]}")

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = _figure(drawn)
    partial = target.with_name(f".{target.stem}.partial{target.suffix}")
    try:
        figure.savefig(partial, dpi=120)
        partial.replace(target)
    except OSError as error:
        raise Refused(f"--to {target}: cannot be written: {error.strerror or one_line(error)}") from None
    finally:
        partial.unlink(missing_ok=True)
        plt.close(figure)


def _figure(drawn: list[_Curves]) -> Any:
    """The panels above each other, over the same steps."""
    import matplotlib.pyplot as plt

    # an accuracy beside the loss when the task has one
    names = sorted({name for curves in drawn for line in curves.evaluations for name in line["eval"] if name != "loss"})
    panels = ["loss", *(["metrics"] if names else []), "lr", "samples_per_s", "data_wait"]
    figure, axes = plt.subplots(len(panels), 1, figsize=(9, 2.3 * len(panels) + 0.6), sharex=True)
    for axis, panel in zip(axes, panels, strict=True):
        for curves in drawn:
            if panel == "metrics":
                _draw_metrics(axis, curves, names)
            else:
                _draw_training(axis, curves, panel)
        axis.set_ylabel(names[0] if panel == "metrics" and len(names) == 1 else _TITLES[panel], fontsize=9)
        axis.grid(alpha=0.25)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        if panel in ("data_wait", "samples_per_s"):
            axis.set_ylim(bottom=0)
        if panel in ("loss", "metrics"):
            axis.legend(fontsize=8, frameon=False)
    axes[-1].set_xlabel("step")
    figure.suptitle(", ".join(curves.name for curves in drawn), fontsize=11)
    figure.tight_layout()
    figure.align_ylabels(axes)
    return figure


def _draw_metrics(axis: Any, curves: _Curves, names: list[str]) -> None:
    """What the evaluations measured beside the loss."""
    for place, name in enumerate(names):
        points = [(line["step"], line["eval"][name]) for line in curves.evaluations if name in line["eval"]]
        if points:  # else another run's task has this one
            axis.plot(
                *zip(*points, strict=True), _STYLES[place % 4], color=curves.colour, marker="o", markersize=3,
                label=f"{curves.prefix}{name}",
            )  # fmt: skip


def _draw_training(axis: Any, curves: _Curves, panel: str) -> None:
    """A figure of the training lines; beside the loss that of the evaluations."""
    is_loss = panel == "loss"
    values = [dict(line)[panel] for line in curves.training]
    if panel == "data_wait":  # as a share of the step
        values = [100 * line["data_wait"] / max(line["step_time"], 1e-12) for line in curves.training]
    steps = [line["step"] for line in curves.training]
    label = f"{curves.prefix}training" if is_loss else curves.name
    axis.plot(steps, values, color=curves.colour, alpha=0.55 if is_loss else 1, linewidth=1.2, label=label)
    if is_loss and curves.evaluations:
        points = [(line["step"], line["eval"]["loss"]) for line in curves.evaluations]
        label = f"{curves.prefix}evaluation"
        axis.plot(*zip(*points, strict=True), "-o", color=curves.colour, markersize=3, label=label)

"""Pictures of runs: loss, learning rate, throughput and data wait over the steps."""

from __future__ import annotations

from pathlib import Path

from train.errors import Refused, one_line
from train.record import metrics
from train.record.store import Run

SUFFIXES = (".png", ".svg", ".pdf")


def plot(runs: list[Run], target: Path) -> None:
    """Draw the runs into one picture.

    Raises:
        Refused: the suffix is unknown, the folder is missing, or no run has metrics yet.
    """
    if target.suffix not in SUFFIXES:
        raise Refused(f"--to {target}: must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    if not target.absolute().parent.is_dir():
        raise Refused(f"--to {target}: there is no folder {target.parent}; make it first")
    data = {run.name: metrics.read(run) for run in runs}
    empty = [name for name, (training, _) in data.items() if not training]
    if empty:
        raise Refused(f"{', '.join(empty)} has no metrics to plot yet; see: train logs {empty[0]}")

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # bars of an accuracy beside the loss when the task has one
    share = sorted({k for _, es in data.values() for e in es for k in e["eval"] if k != "loss"})
    panels = ["loss", *(["metrics"] if share else []), "lr", "samples_per_s", "data_wait"]
    figure, axes = plt.subplots(len(panels), 1, figsize=(9, 2.3 * len(panels) + 0.6), sharex=True)
    styles = ["-", "--", ":", "-."]
    for number, (name, (training, evaluations)) in enumerate(data.items()):
        colour = f"C{number % 10}"
        steps = [line["step"] for line in training]
        label = f"{name}  " if len(data) > 1 else ""
        for axis, panel in zip(axes, panels, strict=True):
            if panel == "metrics":
                for place, metric in enumerate(share):
                    points = [(e["step"], e["eval"][metric]) for e in evaluations if metric in e["eval"]]
                    if not points:  # another run's task has this one
                        continue
                    axis.plot(
                        *zip(*points, strict=True), styles[place % 4], color=colour, marker="o", markersize=3,
                        label=f"{label}{metric}",
                    )  # fmt: skip
                continue
            values = [dict(line)[panel] for line in training]
            if panel == "data_wait":  # as a share of the step
                values = [100 * line["data_wait"] / max(line["step_time"], 1e-12) for line in training]
            tag = f"{label}training" if panel == "loss" else name
            axis.plot(steps, values, color=colour, alpha=0.55 if panel == "loss" else 1, linewidth=1.2, label=tag)
            if panel == "loss" and evaluations:
                points = [(e["step"], e["eval"]["loss"]) for e in evaluations]
                axis.plot(*zip(*points, strict=True), "-o", color=colour, markersize=3, label=f"{label}evaluation")
    titles = {
        "loss": "loss", "metrics": share[0] if len(share) == 1 else "metrics", "lr": "learning rate",
        "samples_per_s": "samples / s", "data_wait": "waiting for data, % of a step",
    }  # fmt: skip
    for axis, panel in zip(axes, panels, strict=True):
        axis.set_ylabel(titles[panel].replace(", ", ",\n"), fontsize=9)
        axis.grid(alpha=0.25)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        if panel == "data_wait" or panel == "samples_per_s":
            axis.set_ylim(bottom=0)
        if panel in ("loss", "metrics"):
            axis.legend(fontsize=8, frameon=False)
    axes[-1].set_xlabel("step")
    figure.suptitle(", ".join(data), fontsize=11)
    figure.tight_layout()
    figure.align_ylabels(axes)
    partial = target.with_name(f".{target.stem}.partial{target.suffix}")
    try:
        figure.savefig(partial, dpi=120)
        partial.replace(target)
    except OSError as error:
        raise Refused(f"--to {target}: cannot be written: {error.strerror or one_line(error)}") from None
    finally:
        partial.unlink(missing_ok=True)
        plt.close(figure)

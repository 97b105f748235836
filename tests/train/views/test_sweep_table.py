"""Runs that are compared by their fields: mean, deviation, the best run, and curves of the mean."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.train.conftest import Station
from train.run import folders
from train.run.run_folder import Run
from train.views import plot

ACCURACIES = {"x1": (0.1, 0, [0.5, 0.7]), "x2": (0.1, 1, [0.8, 0.6]), "x3": (0.01, 0, [0.9, 0.2]), "x4": (0.01, 1, [])}
"""Maps runs to their rate, their seed and the accuracies of their evaluations."""


@pytest.fixture
def compared(station: Station) -> Station:
    for name, (rate, seed, values) in ACCURACIES.items():
        lines: list[dict[str, Any]] = [{"step": 1, "epoch": 1, "loss": rate, "lr": rate}]
        lines += [
            {"step": step, "epoch": step, "eval": {"accuracy": value, "loss": 1 - value}, "samples": 9}
            for step, value in enumerate(values, start=1)
        ]
        files: dict[str, str | bytes] = {
            "config.toml": f"seed = {seed}\n[optim]\nlr = {rate}\n[checkpoint]\nbest = 'max:accuracy'\n",
            "metrics.jsonl": "".join(json.dumps(line) + "\n" for line in lines),
        }
        state = "finished" if values else "failed"
        folders.create(station.runs, name, files=files, record={"state": state, "world_size": 1, "task": "digits"})
    return station


def test_ls_compares_runs_by_a_field(compared: Station) -> None:
    lines = compared.ok("ls", "x*", "--by", "optim.lr").stdout.splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["OPTIM.LR", "N", "ACCURACY", "STATE", "BEST"],
        ["0.01", "1/2", "0.9000", "x4", "failed", "x3"],
        ["0.1", "2/2", "0.7500", "±", "0.0707", "finished", "x2"],
    ]
    assert lines[3] == "the best so far: x3; to continue it: train fork x3 --name NEW --epochs N"


def test_ls_compares_by_the_last_value_and_by_a_loss(compared: Station) -> None:
    last = compared.ok("ls", "--by", "optim.lr", "--metric", "last:accuracy", "--csv").stdout
    rows = [*csv.DictReader(io.StringIO(last))]
    assert [(row["optim.lr"], round(float(row["mean"]), 9), row["best"]) for row in rows] == [
        ("0.1", 0.65, "x1"),
        ("0.01", 0.2, "x3"),
    ]
    found = json.loads(compared.ok("ls", "--by", "seed", "--metric", "loss", "--json").stdout)
    measured = {row["parameters"]["seed"]: (row["n"], row["of"], round(row["mean"], 9)) for row in found}
    assert measured == {"0": (2, 2, 0.2), "1": (1, 2, 0.2)}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--by", "optim.lrr"), "no run here has this field; did you mean optim.lr"),
        (("--by", "optim.lr", "--sort", "accuracy"), "leave out --columns, --sort"),
        (("--metric", "accuracy"), "--metric is for the table of a sweep, and for --by"),
    ],
)
def test_a_wrong_comparison_is_refused(compared: Station, words: tuple[str, ...], why: str) -> None:
    done = compared("ls", *words)
    assert done.returncode == 2 and why in done.stderr, done.stderr


def test_a_metric_that_no_run_has_is_named(compared: Station) -> None:
    assert "no run has the metric wer; there are:" in compared.ok("ls", "--by", "seed", "--metric", "wer").stdout


def test_plot_leaves_out_trials_without_metrics(compared: Station) -> None:
    folders.create(compared.runs, "x5", files={"config.toml": "seed = 0\n"}, record={"trial_of": "s", "world_size": 1})
    done = compared.ok("plot", "x1", "x5", "--to", compared.folder / "one.png")
    assert "x5 has no metrics yet, so it is left out" in done.stderr and (compared.folder / "one.png").exists()
    refused = compared("plot", "x5", "--to", compared.folder / "none.png")
    assert refused.returncode == 2 and "x5 has no metrics to draw yet" in refused.stderr


def test_plot_draws_the_mean_and_its_deviation(compared: Station, tmp_path: Path) -> None:
    runs = [Run(compared.runs / name) for name in ("x1", "x2", "x3")]
    figure, _ = plot.picture(runs, ["optim.lr"])
    axis = next(axis for axis in figure.axes if axis.get_ylabel() == "accuracy")
    assert [[round(float(y), 9) for y in line.get_ydata()] for line in axis.lines] == [[0.65, 0.65], [0.9, 0.2]]
    (band,) = axis.collections
    heights = sorted({round(float(y), 4) for _, y in band.get_paths()[0].vertices})
    assert heights == [0.4379, 0.5793, 0.7207, 0.8621]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["optim.lr=0.1  mean of 2", "optim.lr=0.01"]

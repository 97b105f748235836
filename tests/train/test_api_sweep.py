"""Sweeps from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import train
from tests.train.conftest import Station

SCRIPT = """
import json, os, sys
with open(os.environ["TRAIN_RUN_DIR"] + "/metrics.jsonl", "a") as file:
    file.write(json.dumps({"step": 1, "score": float(sys.argv[1]) + float(sys.argv[2])}) + "\\n")
"""


def test_a_sweep_is_started_waited_for_and_read(station: Station, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(station.folder)
    for name, value in station.environment("sweep").items():
        monkeypatch.setenv(name, value)
    Path("fit.py").write_text(SCRIPT)
    where: dict[str, Any] = {"script": "fit.py", "arguments": ["{x}", "{seed}"], "runs": station.runs}
    made = train.sweep(name="api", grid={"x": np.array([3.0])}, repeat=2, metric="max:score", **where)
    assert made.wait() == "finished" == made.state
    assert [run.name for run in made.trials] == ["api-001", "api-002"]
    (row,) = made.rows
    assert (row["parameters"], row["n"], row["mean"]) == ({"x": "3.0"}, 2, 3.5)
    assert made.best is not None and made.best.name == "api-002"
    assert "3.5000 ± 0.7071" in made.table() and made.table().endswith("train show api-002")


def test_evaluations_come_while_the_run_trains_and_end_with_it(
    station: Station, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(station.folder)
    for name, value in station.environment("launch").items():
        monkeypatch.setenv(name, value)
    run = train.launch("digits", name="evaluated", epochs=1000, cpu_threads=1, runs=station.runs)
    steps = []
    for found in run.evaluations():
        steps.append(found["step"])
        assert 0 <= found["eval"]["accuracy"] <= 1
        if len(steps) == 2:
            assert run.state == "running"
            run.stop()
    assert run.state == "stopped" and len(steps) >= 2
    assert steps == [line["step"] for line in run.metrics if "eval" in line] == sorted({*steps})
    assert [found["step"] for found in run.evaluations()] == steps


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: train.sweep("digits", name="never", grid={"optim.lrr": [1]}), "did you mean optim.lr"),
        (lambda: train.sweep("digits", name="never", grid={"log.wandb": ["a,b"]}), "'a,b' has a comma"),
        (lambda: train.sweep("digits", name="never", repeat=3), "no trials"),
        (lambda: train.sweep("digits", name="never", grid={"seed": [1]}, dry_run=True), "for the command line"),
        (lambda: train.sweep("digits", name="never", search={"optim.lr": "log:1e-3..1"}), "number of draws"),
        (lambda: train.Sweep(Path("runs"), "never").add({"seed": [1]}), "no run never"),
        (lambda: train.Sweep(Path("runs"), "never").rows, "no run never"),
    ],
)
def test_a_wrong_sweep_is_refused(call: Any, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(train.Refused, match=why):
        call()
    assert not [*tmp_path.iterdir()]

"""Which checkpoints stay: the newest, and the best by a metric, whatever interrupts the removing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from train import faults
from train.checkpoint.prune import prune
from train.run.run_folder import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Evaluated at all steps but the last, with two equal values and one that is not finite."""
    made = Run(tmp_path / "run")
    made.folder.mkdir()
    scores = {2: 0.7, 4: 0.9, 6: 0.9, 8: None, 10: 0.8, 12: 0.1, 14: 0.2}
    lines = [json.dumps({"step": step, "epoch": 1, "eval": {"f1": score}}) for step, score in scores.items()]
    made.metrics.write_text("\n".join(lines) + "\n")
    for step in (*scores, 16):
        made.checkpoint(step).mkdir(parents=True)
    return made


@pytest.mark.parametrize(
    ("keep", "metric", "keep_best", "stay"),
    [
        (2, "", 1, [14, 16]),
        (1, "f1", 1, [6, 16]),
        (1, "f1", 2, [4, 6, 16]),
        (1, "f1", 3, [4, 6, 10, 16]),
        (2, "min:f1", 2, [12, 14, 16]),
        (1, "f1", 99, [2, 4, 6, 10, 12, 14, 16]),
    ],
)
def test_the_newest_and_the_best_stay(run: Run, keep: int, metric: str, keep_best: int, stay: list[int]) -> None:
    prune(run, keep, metric, keep_best)
    assert sorted(run.steps_saved()) == stay and len(os.listdir(run.checkpoints)) == len(stay)
    prune(run, keep, metric, keep_best)
    assert sorted(run.steps_saved()) == stay


def test_a_prune_that_fails_on_the_way_is_completed_by_the_next_with_another_count(run: Run) -> None:
    faults.arm("prune.renamed:2:error", 0)
    try:
        prune(run, 1, "f1", 3)
    finally:
        faults.arm(None, 0)
    assert {4, 6, 10, 16} <= set(run.steps_saved())
    prune(run, 1, "f1", 2)
    assert sorted(os.listdir(run.checkpoints)) == ["step-00000004", "step-00000006", "step-00000016"]


def test_a_run_keeps_its_best_and_show_lists_them_on_a_resume_with_another_count_too(engine: Any) -> None:
    flags = {"checkpoint__best": "loss", "checkpoint__keep": 1, "eval__every_steps": 1}
    engine.run("best", steps=6, checkpoint__keep_best=3, **flags)
    run = engine.station.run("best")
    worst_first = sorted(((line["eval"]["loss"], -line["step"]) for line in engine.station.metrics("best")
                          if "eval" in line), reverse=True)  # fmt: skip
    assert set(run.steps_saved()) == {6, *(-step for _, step in worst_first[-3:])}
    shown = engine.station.ok("show", "best").stdout
    assert all(f"step {-step} (" in shown for _, step in worst_first[-3:-1]) and "; then step" in shown
    engine.resume("best", steps=7, checkpoint__keep_best=1)
    assert len(run.steps_saved()) <= 2
    refused = engine.station("resume", "best", "--steps", 9, "--checkpoint.best", "", "--checkpoint.keep_best", 2)
    assert refused.returncode == 2 and "no effect without --checkpoint.best" in refused.stderr

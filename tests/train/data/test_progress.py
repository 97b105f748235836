"""`train.progress()` says the same everywhere: the step that a batch is for, however far ahead it is fetched."""

from __future__ import annotations

import collections
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tasks import TASKS
from tests.train.tiers import later

pytestmark = pytest.mark.usefixtures("engine")

ROOT = Path(__file__).parents[3]
FLAGS: dict[str, Any] = {
    "task": TASKS / "whereabouts.py", "optim__lr": 0.001, "precision": "fp64", "eval__every_steps": 3,
    "checkpoint__every_steps": 4, "schedule__decay": "constant",
}  # fmt: skip


def assert_told(engine: Any, name: str, total: int) -> None:
    lines = engine.lines(name)
    assert [line["step"] for line in lines if "loss" in line] == [*range(1, total + 1)]
    assert [line["step"] for line in lines if "eval" in line] == [*range(3, total, 3), total]
    for line in lines:
        figures: dict[str, list[float]] = collections.defaultdict(list)
        for key, value in line.get("eval", line).items():
            figures[key.removeprefix("metric_").removeprefix("loss.")].append(value)
        for key in ("fetched_step", "fetched_collate", "on_device", *(("predicted_step",) if "eval" in line else ())):
            assert set(figures[key]) == {line["step"]}, (key, line)
        assert set(figures["fetched_epoch"]) == {line["epoch"]}, line
        assert set(figures["fetched_total"]) == {total}, line
        if "eval" in line:
            told = {name: line["eval"][f"metric_{name}"] for name in ("step", "epoch", "total")}
            assert told == {"step": line["step"], "epoch": line["epoch"], "total": total}
            assert line["eval"]["computed_step"] == line["step"]
        else:
            assert (line["loss.step"], line["loss.epoch"], line["loss.total"]) == (line["step"], line["epoch"], total)


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (3, 2), *later((1, 3), (3, 0))])
def test_each_function_is_told_the_step_of_its_batch(engine: Any, ranks: int, workers: int) -> None:
    name = f"where-{ranks}-{workers}"
    assert engine.run(name, ranks, data__workers=workers, **FLAGS)["state"] == "finished", engine.said(name)
    assert_told(engine, name, 10)


def test_a_resume_goes_on_where_it_is_with_the_new_number_of_steps(engine: Any) -> None:
    flags = FLAGS | {"steps": 5, "data__workers": 1}
    assert engine.run("where-more", 2, **flags)["step"] == 5, engine.said("where-more")
    engine.resume("where-more", 2, steps=9)
    later_lines = [line for line in engine.lines("where-more") if line["step"] > 5 and "loss" in line]
    assert [(line["loss.fetched_step"], line["loss.fetched_total"]) for line in later_lines] == [
        (step, 9) for step in range(6, 10)
    ]


def test_an_evaluation_of_a_checkpoint_is_told_its_step(engine: Any) -> None:
    engine.run("where-eval", 1, steps=4, **FLAGS)
    answer = engine.station.ok("eval", "where-eval", "--checkpoint", 4).stdout
    assert "metric_fetched_step 4" in " ".join(answer.split()), answer


def test_outside_of_a_run_it_says_so_in_a_line() -> None:
    for package in ("train", "trainstation"):  # in a process of its own: runs of this one have set it
        code = f"import {package}; {package}.progress()"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
        assert (
            "Refused: train.progress() is known only while a run fetches or computes a batch: call it in" in done.stderr
        )

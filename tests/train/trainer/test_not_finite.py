"""What `on_nan skip` leaves out: all of a step's update, on all ranks alike, counted and listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tasks import TASKS
from tests.train.specs import with_spec
from tests.train.training import sample_of
from train.trainer.load import load_trained

pytestmark = [pytest.mark.never_forgiven, pytest.mark.turns]

SKIP = {"on_nan": "skip", "schedule__decay": "constant", "schedule__warmup_epochs": 0, "task__batchnorm": "true"}
POISON = {"task__poison": sample_of(3)}
"""The loss of the third step is infinite, and that of a step in each later epoch."""
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (3, {}), "fsdp": (2, {"parallel__strategy": "fsdp"}),
    "ordered": (2, {"parallel__reduce": "ordered"}),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_step_left_out_changes_neither_weights_nor_statistics(engine: Any, way: str) -> None:
    ranks, flags = WAYS[way]
    engine.run(f"skip2-{way}", ranks, steps=2, **SKIP, **flags)
    record = engine.run(f"skip3-{way}", ranks, steps=3, **SKIP, **POISON, **flags)
    assert (record["state"], record["step"], record["nan_steps"]) == ("finished", 3, 1), engine.said(f"skip3-{way}")
    assert record["weights_sha256"] == engine.station.record(f"skip2-{way}")["weights_sha256"]
    line = next(line for line in engine.station.metrics(f"skip3-{way}") if line["step"] == 3)
    assert line["skipped"] is True and line["loss"] is None
    assert "the update of step 3 is left out" in engine.said(f"skip3-{way}")


def test_the_same_steps_are_left_out_on_any_ranks_and_through_a_kill(engine: Any) -> None:
    flags = POISON | {"on_nan": "skip", "precision": "fp64", "checkpoint__every_steps": 4, "log__every_steps": 100}
    assert engine.run("skip-one", 1, **flags)["nan_steps"] > 1
    engine.run("skip-three", 3, **flags)
    for key, value in engine.weights("skip-one").items():
        torch.testing.assert_close(engine.weights("skip-three")[key], value, rtol=1e-9, atol=1e-12)
    engine.run("skip-killed", 3, fault="step@1:8", **flags)
    assert engine.resume("skip-killed", 3)["nan_steps"] == engine.station.record("skip-one")["nan_steps"]
    assert engine.outcome("skip-killed") == engine.outcome("skip-three")


def _task(folder: Path, more: str) -> Path:
    """A task of few numbers, to whose loss this is added."""
    task = folder / "task.py"
    text = (TASKS / "few_numbers.py").read_text()
    task.write_text(text.replace(".mean()", f".mean() + {more}"))
    return task


def test_a_gradient_that_is_not_finite_is_enough(engine: Any, tmp_path: Path) -> None:
    task = _task(tmp_path, "(0 * model.weight * (numbers == 0).sum()).abs().sqrt().sum()")
    record = engine.run("skip-gradient", 2, task=task, epochs=1, on_nan="skip")
    lines = [line for line in engine.station.metrics("skip-gradient") if line.get("skipped")]
    assert (record["state"], record["nan_steps"], len(lines)) == ("finished", 4, 4)
    assert all(line["loss"] is not None for line in lines)


def test_ten_in_a_row_end_the_run(engine: Any, tmp_path: Path) -> None:
    record = engine.run("skip-all", 2, task=_task(tmp_path, "float('nan')"), epochs=5, on_nan="skip")
    assert (record["state"], engine.code) == ("failed", 3)
    assert "10 steps in a row, up to step 10, had a loss or gradients that are not finite" in record["reason"]


def test_in_the_first_step_the_rate_is_not_blamed(engine: Any) -> None:
    record = engine.run("nan-first", 2, task__poison=sample_of(1))
    assert "the loss is inf at step 1, with the initial weights" in record["reason"]
    assert "optim.lr" not in record["reason"]


def test_of_several_updates_those_that_are_finite_are_made(engine: Any, tmp_path: Path) -> None:
    task, text = tmp_path / "gan.py", (TASKS / "gan.py").read_text()
    changed = text.replace(
        "(-model.d(made)).mean()", "(-model.d(made)).mean() * (float('nan') if len(points) == 3 else 1)"
    )
    assert changed != text
    task.write_text(changed)
    flags = {"optim__name": None, "optim__lr": None, "log__gradients": "true", "checkpoint__every_steps": 3}
    record = engine.run("gan-skip", 3, task=task, steps=5, on_nan="skip", **flags)
    assert (record["state"], record["nan_steps"]) == ("finished", 1), engine.said("gan-skip")
    lines = [line for line in engine.station.metrics("gan-skip") if "loss" in line]
    assert [line["step"] for line in lines if line.get("skipped")] == [4]  # the last batch of an epoch has a short one
    assert (lines[3]["loss.g"], lines[3]["grad_norm"]) == (None, None) and lines[3]["loss.d"] > 0
    before, after = (load_trained(*with_spec(engine.station.run("gan-skip")), step)[2].state_dict() for step in (3, 5))
    for name, value in after.items():
        assert (value == before[name]).all() == name.startswith("g."), name  # of the generator no other update was due

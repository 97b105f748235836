"""Figures of a step beside its loss: the norm of its gradients, and what its loss has counted."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tasks import TASKS
from tests.train.specs import with_spec
from tests.train.training import CLOSE
from train.trainer.load import load_trained

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.never_forgiven

PLAIN = {
    "steps": 2, "precision": "fp64", "log__gradients": "true", "optim__momentum": 0, "optim__weight_decay": 0,
    "schedule__decay": "constant", "schedule__warmup_epochs": 0, "checkpoint__every_steps": 1,
}  # fmt: skip


def _norms(engine: Any, name: str) -> list[float]:
    return [line["grad_norm"] for line in engine.station.metrics(name) if "loss" in line]


@pytest.fixture(scope="module")
def norms(engine: Any) -> list[float]:
    """Of the run `norms`, on one rank, without clipping."""
    engine.run("norms", 1, **PLAIN)
    return _norms(engine, "norms")


def test_the_norm_of_the_gradients_is_that_of_the_update_over_the_rate(engine: Any, norms: list[float]) -> None:
    first, second = (load_trained(*with_spec(engine.station.run("norms")), step)[2] for step in (1, 2))
    update = torch.cat([(a - b).flatten() for a, b in zip(first.parameters(), second.parameters(), strict=True)])
    assert norms[1] == pytest.approx(update.norm().item() / 0.1, rel=1e-6)


@pytest.mark.parametrize(("ranks", "flags"), [(3, {}), (2, {"parallel__strategy": "fsdp"})])
def test_it_is_the_same_on_any_ranks(engine: Any, norms: list[float], ranks: int, flags: dict[str, Any]) -> None:
    engine.run(f"norms-{ranks}", ranks, **PLAIN, **flags)
    assert _norms(engine, f"norms-{ranks}") == pytest.approx(norms, **CLOSE)


def test_a_clipped_step_logs_the_norm_from_before(engine: Any, norms: list[float]) -> None:
    engine.run("norms-clipped", 1, **PLAIN, clip_grad_norm=1e-3)
    clipped = _norms(engine, "norms-clipped")
    assert clipped[0] == pytest.approx(norms[0], **CLOSE) and min(clipped) > 1e-3


def test_what_a_loss_counts_by_itself_is_logged_by_the_second(engine: Any, norms: list[float]) -> None:
    engine.run("counts", 2, steps=4, task__counted="true")
    lines = [line for line in engine.station.metrics("counts") if "loss" in line]
    assert all(0 < line["counted_per_s"] < line["samples_per_s"] for line in lines)  # two of three samples
    assert all("counted_per_s" not in line for line in engine.station.metrics("norms"))


@pytest.mark.minutes
def test_a_figure_is_added_by_a_line_in_the_step_and_one_in_the_type(station: Any, tmp_path: Path) -> None:
    """In a copy of the package: it lands in metrics.jsonl and, like every figure, in TensorBoard's events."""
    copied = tmp_path / "checkout"
    shutil.copytree(ROOT / "train", copied / "train", ignore=shutil.ignore_patterns("__pycache__"))
    _insert(
        copied / "train/trainer/step.py",
        before="    return result\n",
        line='    result.figures["rows"] = samples + 0 * sums[LOSS]\n',
    )
    _insert(
        copied / "train/run/metrics.py",
        before="    skipped: NotRequired[bool]\n",
        line="    rows: NotRequired[float]\n",
    )
    task = tmp_path / "few_numbers.py"
    task.write_text((TASKS / "few_numbers.py").read_text())
    flags = ["--steps", 2, "--batch_size", 4, "--log.every_steps", 1, "--cpu_threads", 1, "--log.gradients", "true"]
    done = station("run", task, "--name", "rows", *flags, env={"PYTHONPATH": str(copied)})
    assert done.returncode == 0, done.stderr
    lines = [line for line in station.metrics("rows") if "loss" in line]
    assert [line["rows"] for line in lines] == [4, 4] and all(line["grad_norm"] > 0 for line in lines)
    (events,) = (station.runs / "rows/tensorboard").iterdir()
    assert b"train/rows" in events.read_bytes()


def _insert(file: Path, before: str, line: str) -> None:
    text = file.read_text()
    assert text.count(before) == 1
    file.write_text(text.replace(before, line + before))

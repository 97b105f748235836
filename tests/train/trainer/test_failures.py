"""A loss or weights that are not finite end the run: the step is named and the last good checkpoint left."""

from __future__ import annotations

import datetime
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.train.tiers import later
from tests.train.training import sample_of, step_of
from train.data.loader import Loader
from train.data.plan import MicroBatch
from train.supervise import health
from train.supervise.diagnose import failure_of

pytestmark = pytest.mark.never_forgiven


def test_a_loss_that_is_not_finite_ends_the_run_and_leaves_the_checkpoint_before(engine: Any) -> None:
    poison = sample_of(3)
    assert step_of(poison) == 3
    name = "poisoned"
    record = engine.run(name, 3, task__poison=poison, checkpoint__every_steps=1)
    assert (engine.code, record["state"]) == (3, "failed")
    assert "the loss is inf at step 3" in record["reason"]
    assert os.listdir(engine.station.runs / name / "checkpoints").count("step-00000003") == 0
    assert engine.station.run(name).steps_saved()[0] == 2
    assert [line["step"] for line in engine.station.metrics(name) if "loss" in line] == [1, 2]


def test_nan_is_refused_as_a_loss_as_well(engine: Any) -> None:
    record = engine.run("nan", 2, task__poison=sample_of(4), task__poison_value=-1, task__counted="true")
    assert (engine.code, record["state"]) == (3, "failed")
    assert "the loss is nan at step 4" in record["reason"]
    assert engine.station.run("nan").steps_saved() == []


def test_a_failure_that_only_another_rank_meets_is_the_reason(engine: Any) -> None:
    record = engine.run("alone", 2, ["3 1 vector"])
    assert (engine.code, record["state"]) == (3, "failed")
    assert "rank 1: loss in" in record["reason"] and "scalar" in record["reason"]


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "auto"), (2, "fsdp"), *later((2, "ddp"))])
def test_an_error_in_an_evaluation_costs_no_step(engine: Any, tmp_path: Path, ranks: int, strategy: str) -> None:
    task = tmp_path / "late.py"  # an error of one rank alone, in the second evaluation, in the last, short micro batch
    task.write_text(
        engine.task.read_text() + "\n\n_seen = []\n\n\ndef metrics(model: Any, batch: Any) -> dict[str, Any]:\n"
        "    _seen.append(len([*batch.values()][0]) < 4)\n"
        "    mended = Path(os.environ['TRAIN_RUN_DIR'], 'mended').exists()\n"
        f"    if sum(_seen) == {1 if strategy == 'fsdp' else 2} and _seen[-1] and not mended:\n"
        "        raise ValueError('a short one')\n    return {}\n"
    )
    name = f"late-{ranks}-{strategy}"
    flags = {"eval__every_steps": 2, "eval__first": "false", "steps": 6, "parallel__strategy": strategy}
    record = engine.run(name, ranks, task=task, **flags)
    at = 2 if strategy == "fsdp" else 4
    assert (engine.code, record["state"]) == (3, "failed") and "ValueError: a short one" in record["reason"]
    assert engine.station.run(name).newest_checkpoint == at
    (engine.station.runs / name / "mended").touch()
    assert engine.resume(name, ranks)["state"] == "finished"
    assert engine.station.record(name)["attempts"][-1]["from_step"] == at
    assert [line["step"] for line in engine.station.metrics(name) if "eval" in line] == [2, 4, 6]


def test_the_others_do_not_wait_for_a_rank_that_failed_before_they_met_it(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only rank 0, whose output is not its log file, in the run folder."""
    monkeypatch.setattr(health, "GRACE_AFTER_EXIT", 2.0)
    task = tmp_path / "unlucky.py"
    head = "def datasets(config: Any) -> tuple[Points, Points | None]:\n"
    more = (
        '    first = not os.readlink("/proc/self/fd/1").endswith("rank1.log")\n'
        '    if first and Path(__spec__.origin).with_name("lock").exists():\n'
        '        raise MemoryError("all at once")\n'
    )
    assert engine.task.read_text().count(head) == 1
    task.write_text(engine.task.read_text().replace(head, head + more))
    record = engine.run("unlucky", 2, task=task, parallel__timeout_minutes=10)
    assert record["state"] == "failed" and "all at once" in record["reason"]
    started, ended = (datetime.datetime.fromisoformat(record["attempts"][0][key]) for key in ("started", "ended"))
    assert (ended - started).total_seconds() < 300  # half the time that ranks wait for each other


def test_what_a_data_set_raises_in_a_worker_would_recur() -> None:
    class Broken(list[int]):
        def __getitem__(self, index: Any) -> Any:
            raise RuntimeError("no Connection between these samples")

    micros = iter([MicroBatch(step=0, number=0, indices=np.arange(2), seed=0)])
    loader = Loader(Broken([1, 2]), {}, collate=None, workers=1, device=torch.device("cpu"), dtype=None)
    with loader, pytest.raises(RuntimeError) as caught:
        next(loader.batches(micros))
    assert failure_of(caught.value, None)["recurs"]
    assert not failure_of(RuntimeError("Connection closed by peer"), None)["recurs"]


def test_a_gpu_without_memory_leaves_a_snapshot_of_it(engine: Any, tmp_path: Path) -> None:
    task = tmp_path / "full.py"
    fails = (
        "def loss(model, batch):\n    raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 9.00 GiB')\n"
    )
    task.write_text(f"{engine.task.read_text()}\n\n{fails}")
    reason = engine.run("gpu-full", task=task)["reason"]
    assert "out of memory" in reason and "attempt-1/rank0.memory.pickle, for https://pytorch.org/memory_viz" in reason
    found = pickle.loads((engine.station.runs / "gpu-full/logs/attempt-1/rank0.memory.pickle").read_bytes())
    assert "segments" in found

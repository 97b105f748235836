"""A loss or weights that are not finite end the run: the step is named and the last good checkpoint left."""

from __future__ import annotations

import datetime
import os
import pickle
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from tests.train.conftest import PATIENCE
from tests.train.training import sample_of, step_of
from train.data.loader import Loader
from train.data.plan import MicroBatch
from train.supervise.diagnose import failure_of


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_loss_that_is_not_finite_ends_the_run_and_leaves_the_checkpoint_before(engine: Any, ranks: int) -> None:
    poison = sample_of(3)
    assert step_of(poison) == 3
    name = f"poisoned{ranks}"
    record = engine.run(name, ranks, task__poison=poison, checkpoint__every_steps=1)
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


def test_a_peer_that_aborts_because_a_rank_failed_is_not_the_reason(engine: Any) -> None:
    record = engine.run("aborted", 2, ["3 1 vector", "3 0 sh (sleep 3; kill -ABRT $PPID) &"])
    assert (engine.code, record["state"]) == (3, "failed")
    assert "rank 1: loss in" in record["reason"]


def test_the_others_do_not_wait_for_a_rank_that_failed_before_they_met_it(engine: Any, tmp_path: Path) -> None:
    """Only rank 0, whose output is not its log file, in the run folder."""
    task = tmp_path / "unlucky.py"
    head = "def datasets(config: Any) -> tuple[Points, Points | None]:\n"
    more = (
        '    first = not os.readlink("/proc/self/fd/1").endswith("rank1.log")\n'
        '    if first and Path(__file__).with_name("lock").exists():\n'
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

    micros = iter([MicroBatch(0, 0, np.arange(2), 0)])
    loader = Loader(Broken([1, 2]), {}, None, 1, torch.device("cpu"), None)
    with loader, pytest.raises(RuntimeError) as caught:
        next(loader.batches(micros))
    assert failure_of(caught.value, None)["recurs"]
    assert not failure_of(RuntimeError("Connection closed by peer"), None)["recurs"]


@pytest.mark.minutes
def test_the_rank_that_failed_is_named_though_its_peers_were_seen_to_die_with_it(engine: Any) -> None:
    station = engine.station
    task = station.folder / "alone.py"
    task.write_text(re.sub(r"(?m)^_plan = .*$", '_plan = [["3", "1", "vector"]]', engine.task.read_text()))
    flags = [part for key, value in engine.flags.items() for part in (f"--{key}", str(value))]
    started = station.start("run", task, "--name", "looked-away", "--spawn", 2, *flags)
    station.wait_for_step("looked-away", 1)
    started.send_signal(signal.SIGSTOP)  # it looks again when all is over
    for pid in station.record("looked-away")["pids"]["ranks"]:
        station.wait("looked-away", lambda _, pid=pid: not psutil.pid_exists(pid), "the end of its ranks")
    started.send_signal(signal.SIGCONT)
    said = started.communicate(timeout=PATIENCE)[0]
    assert started.returncode == 3
    assert "rank 1: loss in" in station.record("looked-away")["reason"]
    assert "rank 1: loss in" in said.splitlines()[-1]
    assert "Traceback" not in said  # of rank 0, whose connection was lost


def test_the_command_exits_with_3_and_says_the_step_in_its_last_line(engine: Any) -> None:
    station = engine.station
    flags = [part for key, value in engine.flags.items() for part in (f"--{key}", str(value))]
    done = station("run", engine.task, "--name", "shown", "--task.poison", sample_of(2), *flags)
    assert done.returncode == 3
    assert "step 2" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert station.record("shown")["state"] == "failed"
    assert station.record("shown")["ended"] is not None


def test_an_error_of_the_data_set_in_a_loader_process_ends_the_run(engine: Any) -> None:
    station = engine.station
    text = engine.task.read_text()
    broken = text.replace(
        "        noise = torch.randn(6)", "        assert index != 33, 'bad sample 33'\n        noise = torch.randn(6)"
    )
    assert broken != text
    task = station.folder / "broken.py"
    task.write_text(broken)
    flags = [part for key, value in engine.flags.items() for part in (f"--{key}", str(value))]
    done = station("run", task, "--name", "broken", "--data.workers", 2, *flags)
    assert done.returncode == 3
    assert "bad sample 33" in done.stderr.splitlines()[-1]
    assert station.record("broken")["state"] == "failed"
    assert not station.run("broken").alive()


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

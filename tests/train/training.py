"""Real runs without the seconds that starting Python and importing torch take: ranks are forked from a warm server.

What runs is what `train run --spawn N` and `train resume` run: the same checks, the same run folder, the same ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import changes
from tests.tasks import TASKS
from tests.train import forks
from tests.train.specs import with_spec
from train import programs
from train.data.order import order
from train.launcher import checks
from train.launcher.fork import prepare_fork
from train.launcher.request import Request
from train.launcher.resume import prepare_resume
from train.run import folders, run_folder
from train.run.spec import read_spec
from train.signals import StopRequest
from train.supervise.attempts import Supervisor
from train.supervise.decide import LaunchMode
from train.supervise.ranks import TaskRanks
from train.trainer.load import load_trained

TASK = TASKS / "learner.py"
SPEED = ("samples_per_s", "data_wait", "step_time", "memory", "counted_per_s")

FLAGS: dict[str, Any] = {
    "epochs": 2.5,  # ten steps: 55 samples in batches of 16 leave a last batch of 7, in micro batches of 4 and 3
    "batch_size": 16,
    "micro_batch_size": 4,
    "cpu_threads": 1,
    "optim.name": "sgd",
    "optim.lr": 0.1,
    "schedule.warmup_epochs": 0.5,
    "checkpoint.every_minutes": 0,
    "log.every_steps": 1,
    "log.samples": "true",
    "log.tensorboard": "false",
}


OWN_OPTIMIZER: dict[str, Any] = {"optim__name": None, "optim__lr": None}
"""Takes what such a task does not use out of FLAGS."""


class Engine:
    """Trains in a folder; looks into what it left."""

    task, flags = TASK, FLAGS

    def __init__(self, station: Any) -> None:
        self.station = station
        self.zygote = forks.zygote(station.environment())

    def run(
        self, name: str, ranks: int = 1, script: Iterable[str] = (), task: Path = TASK, fault: str = "", **flags: Any
    ) -> dict[str, Any]:
        """A new run of the test task, to its end; its effective record. A dot in a flag is written as two _."""
        merged = FLAGS | {key.replace("__", "."): value for key, value in flags.items()}
        if "steps" in merged:
            del merged["epochs"]
        texts = {key: str(value) for key, value in merged.items() if value is not None}
        prepared = checks.prepare(Request(str(task), flags=texts), ranks=ranks)
        made = folders.create(self.station.runs, name, files=prepared.files, record=prepared.record)
        return self.train_run(made, ranks, script, fault)

    def resume(self, name: str, ranks: int = 1, script: Iterable[str] = (), **flags: Any) -> dict[str, Any]:
        """Go on with a run on so many ranks; its effective record."""
        run = self.station.run(name)
        texts = {key.replace("__", "."): str(value) for key, value in flags.items()}
        config, _ = prepare_resume(run, texts, ranks)
        if texts:
            changes.apply(run, config)
        return self.train_run(run, ranks, script)

    def fork(
        self, of: str, name: str, step: int, ranks: int = 1, script: Iterable[str] = (), **flags: Any
    ) -> dict[str, Any]:
        """A new run that goes on from a checkpoint of another one; its effective record."""
        texts = {key.replace("__", "."): str(value) for key, value in flags.items()}
        prepared = prepare_fork(self.station.run(of), step, texts, ranks)
        record = prepared.record | {"world_size": ranks}
        made = folders.create(self.station.runs, name, files=prepared.files, record=record, copies=prepared.copies)
        return self.train_run(made, ranks, script)

    def train_run(self, run: run_folder.Run, ranks: int, script: Iterable[str], fault: str = "") -> dict[str, Any]:
        (run.folder / "script").write_text("\n".join(script))
        lock = run.acquire()
        assert lock is not None, f"{run.name} is alive"
        try:
            made = TaskRanks(
                run,
                read_spec(run),
                lock=lock,
                count=ranks,
                zygote=self.zygote,
                environ={"TRAIN_FAULT": fault},
                is_foreground=True,
            )
            self.code = Supervisor(
                run=run,
                spec=read_spec(run),
                program=programs.TASK,
                ranks=made,
                mode=LaunchMode.FOREGROUND,
                stop=StopRequest(()),
            ).keep()
        finally:
            lock.release()
        return run.read_effective() if (run.folder / "run.json").exists() else {}  # a test may have taken it away

    def lines(self, name: str) -> list[dict[str, Any]]:
        """metrics.jsonl without what measures speed."""
        return [{k: v for k, v in line.items() if k not in SPEED} for line in self.station.metrics(name)]

    def losses(self, name: str) -> list[float]:
        return [line["loss"] for line in self.station.metrics(name) if "loss" in line]

    def evaluations(self, name: str) -> list[dict[str, float]]:
        return [line["eval"] for line in self.station.metrics(name) if "eval" in line]

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        return dict(load_trained(*with_spec(self.station.run(name)))[2].state_dict())

    def outcome(self, name: str) -> tuple[Any, ...]:
        """All that must not depend on how often a run was interrupted, nor on what its folder is called."""
        record = self.station.record(name)
        logs = {path.name: path.read_text() for path in (self.station.runs / name).glob("samples.rank*.log")}
        figures = [record[key] for key in ("state", "step", "epoch", "weights_sha256", "metrics")]
        return figures, self.lines(name), logs

    def said(self, name: str) -> str:
        logs = sorted((self.station.runs / name / "logs").rglob("*.log"))
        return re.sub(r"\s+", " ", "\n".join(path.read_text() for path in logs))


SAMPLES, BATCH = 55, 16
"""Of the test task, and of FLAGS."""


def step_of(sample: int, epoch: int = 0) -> int:
    """The step, counted from 1, that consumes this sample."""
    position = int(np.flatnonzero(order(0, epoch, np.arange(SAMPLES), SAMPLES) == sample)[0])
    return epoch * 4 + position // BATCH + 1


def sample_of(step: int) -> int:
    """A sample that this step of the first epoch consumes, in its last micro batch."""
    return int(order(0, 0, min(step * BATCH, SAMPLES) - 1, SAMPLES))


CLOSE = {"rel": 1e-9, "abs": 1e-12}
"""What the order of sums may change in float64."""


def assert_same_training(engine: Any, name: str, reference: str = "one") -> None:
    assert engine.station.record(name)["state"] == "finished", engine.said(name)
    assert engine.station.samples(name) == engine.station.samples(reference)
    assert engine.losses(name) == pytest.approx(engine.losses(reference), **CLOSE)
    weights, expected = engine.weights(name), engine.weights(reference)
    assert weights.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(weights[key], value, rtol=1e-9, atol=1e-12)
    for found, wanted in zip(engine.evaluations(name), engine.evaluations(reference), strict=True):
        assert found == pytest.approx(wanted, **CLOSE)

"""What is not the same when it is fetched twice is named before a run, and the look at it does not reach the run."""

from __future__ import annotations

import os
import random
import secrets
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from train.data import probe

if TYPE_CHECKING:
    from conftest import Station


class Points(Dataset[Any]):
    def __init__(self, kind: str) -> None:
        self.kind, self.calls, self.seeds, self.kept = kind, 0, np.random.SeedSequence(1), dict[int, Any]()
        hidden = random.Random(1)
        self.draw = lambda: 2 * hidden.random()

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        made: Any = {
            "exact": lambda: np.array([self.draw(), np.nan, random.random(), np.random.rand()]),
            "kept": lambda: self.kept.setdefault(index, torch.rand(3)),
            "secrets": lambda: float(secrets.randbelow(1 << 40)),
            "calls": lambda: self.calls,
            "spawned": lambda: np.random.default_rng(self.seeds.spawn(1)[0]).random(),
            "named": lambda: os.urandom(8).hex(),
            "fails": lambda: 1 // 0,
            "ends": lambda: os._exit(3),
            "slow": lambda: time.sleep(3600),
        }[self.kind]()
        return {"x": torch.ones(2), "y": made}


def _looked_at(kind: str) -> tuple[list[str], Points]:
    dataset = Points(kind)
    return probe.why_not_exact({"training": dataset}, collate=None, made_by=_looked_at, batch=4, seed=7), dataset


def test_a_sample_that_differs_is_named_and_nothing_is_left_of_the_look_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_PATIENCE", 60.0)
    monkeypatch.setattr(probe, "_SLOW", 60.0)
    for kind in ("exact", "kept", "fails", "ends"):
        assert _looked_at(kind)[0] == [], kind
    for kind in ("secrets", "calls", "spawned", "named"):
        before = (random.getstate(), torch.get_rng_state().tolist())
        (line,), dataset = _looked_at(kind)
        assert line.startswith("sample "), line
        assert "of the training set differs in ['y'] when fetched twice" in line
        assert (dataset.calls, dataset.seeds.n_children_spawned) == (0, 0)
        assert (random.getstate(), torch.get_rng_state().tolist()) == before
    assert (
        probe.why_not_exact(
            {"training": TensorDataset(torch.ones(4))}, collate=None, made_by=_looked_at, batch=4, seed=7
        )
        == []
    )


def test_a_slow_data_set_does_not_hold_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_PATIENCE", 0.3)
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    before = children.read_text()
    assert _looked_at("slow")[0] == []
    assert children.read_text() == before


COUNTING = """
import random

import torch
from torch import nn


class Counting(torch.utils.data.Dataset):
    def __init__(self):
        self.calls, hidden = 0, random.Random(1)
        self.draw = lambda: hidden.random()

    def __len__(self):
        return 8

    def __getitem__(self, index):
        self.calls += 1
        return torch.tensor([float(self.calls), self.draw()])


def datasets(config):
    return Counting(), None


def model(config):
    return nn.Linear(1, 1)


def loss(model, batch):
    return model(batch[:, 1:]).sum() * 0 + batch[:, 0].mean()
"""


def test_a_run_says_that_it_is_not_exact_and_begins_as_if_nobody_had_looked(station: Station) -> None:
    (station.folder / "counting.py").write_text(COUNTING)
    flags = ["--steps", 2, "--batch_size", 4, "--data.workers", 0, "--log.every_steps", 1]
    done = station.ok("run", "counting.py", "--name", "counting", *flags)
    assert "warning: not exact: sample " in done.stderr
    assert [line["loss"] for line in station.metrics("counting")] == [2.5, 6.5]  # it counts from 1
    assert "not exact    sample " in station.ok("show", "counting").stdout

"""A run for a look, `train run` without --name: its folder is removed if the run ends before its first checkpoint."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.train.conftest import PATIENCE, Station

TASK = """
import os, signal, sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
calls = []

def datasets(config):
    x = torch.randn(64, 4)
    return TensorDataset(x, x.sum(1, keepdim=True)), None

def model(config):
    return nn.Linear(4, 1)

def loss(model, batch):
    calls.append(1)
    if len(calls) == 3 and os.environ["RANK"] == os.environ.get("WHO"):
        print("last words", file=sys.stderr, flush=True)
        if os.environ["HOW"] == "raise":
            raise ValueError("a bug")
        os._exit(7)
    return (model(batch[0]) - batch[1]).square().mean()
"""
FEW = ("--batch_size", 32, "--steps", 4, "--cpu_threads", 1)


@pytest.fixture
def bad(station: Station) -> Station:
    (station.folder / "bad.py").write_text(TASK)
    return station


def names(station: Station) -> list[str]:
    return sorted(path.name for path in station.runs.iterdir()) if station.runs.exists() else []


@pytest.mark.parametrize(("how", "ranks"), [("raise", 1), ("exit", 2)])
def test_a_run_without_a_name_and_without_a_checkpoint_is_removed(bad: Station, how: str, ranks: int) -> None:
    env = {"WHO": str(ranks - 1), "HOW": how}
    done = bad("run", "bad.py", "--spawn", ranks, *FEW, env=env)
    assert done.returncode == 3 and "ended before its first checkpoint and is removed" in done.stderr, done.stderr
    assert f"its task.py was a copy of {bad.folder / 'bad.py'}" in done.stderr and "last words" in done.stderr
    assert "train resume" not in done.stderr and "train logs" not in done.stderr
    assert names(bad) == []
    done = bad("run", "bad.py", "--spawn", ranks, *FEW, "--name", "named", env=env)
    assert done.returncode == 3 and names(bad) == ["named"] and "removed" not in done.stderr


def test_a_checkpoint_keeps_it_even_one_at_the_end(bad: Station) -> None:
    bad.ok("run", "bad.py", *FEW)
    assert len(names(bad)) == 1
    done = bad("run", "bad.py", *FEW, "--checkpoint.every_steps", 1, env={"WHO": "0", "HOW": "exit"})
    assert done.returncode == 3 and len(names(bad)) == 2, done.stderr
    assert "continue with: train resume" in done.stderr


@pytest.mark.minutes
@pytest.mark.parametrize("how", ["raise", "exit"])
def test_under_torchrun_it_is_removed_after_the_last_try(bad: Station, how: str) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    done = subprocess.run(
        [sys.executable, *torchrun, "-m", "train", "run", "bad.py", *map(str, FEW)],
        cwd=bad.folder, env=bad.environment() | {"WHO": "1", "HOW": how}, capture_output=True, text=True,
        timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.stderr.count("ended before its first checkpoint and is removed") == 1, done.stderr
    assert done.stderr.count("last words") == 2 and names(bad) == []

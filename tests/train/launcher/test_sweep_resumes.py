"""A sweep resumes its trials: one killed before its first attempt, one that is refused, and a stop meanwhile."""

from __future__ import annotations

import contextlib
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.train.conftest import Station
from tests.train.launcher.test_sweep_loop import SMALL, kill_all
from tests.waiting import eventually
from train.launcher import tmux

pytestmark = pytest.mark.turns

TASK = """
import os, time, torch
from torch import nn
from torch.utils.data import TensorDataset
def model(config):
    return nn.Linear(4, 1)
def datasets(config):
    while os.path.exists("HERE/slow"):
        open("HERE/checks", "w").close()
        time.sleep(0.1)
    if config.seed == 0 and os.path.exists("HERE/refuse"):
        raise ValueError("its data are gone")
    return TensorDataset(torch.randn(400, 4, generator=torch.Generator().manual_seed(1))), None
def loss(model, batch):
    time.sleep(0.01)
    return model(batch[0]).square().mean()
"""


def _task(station: Station) -> Path:
    path = station.folder / "slow_task.py"
    path.write_text(TASK.replace("HERE", str(station.folder)))
    return path


def test_a_trial_that_was_killed_before_its_first_attempt_is_started_again(station: Station) -> None:
    station.ok("sweep", _task(station), "--name", "born", "--grid", "seed=1", "--steps", 5, *SMALL[:4])
    command = tmux.tmux(station.runs, "display-message", "-p", "#{pid}")
    server = psutil.Process(int(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    path = station.runs / "born-001" / "run.json"
    while not path.exists():  # a moment later it has begun
        time.sleep(0.001)
    for process in [*server.children(recursive=True), server]:
        with contextlib.suppress(psutil.Error):
            process.kill()
    eventually("all are dead", lambda: not station.run("born").alive() and not station.run("born-001").alive())
    if station.record("born-001")["attempts"]:  # it was too quick: leave what a kill before that leaves
        station.run("born-001").update(state="created", attempts=[], pids={})
    station.ok("resume", "born")
    assert station.wait_for_end("born")["state"] == "finished"
    assert [attempt["end"] for attempt in station.record("born-001")["attempts"]] == ["finished"]


def test_a_sweep_is_stopped_while_it_resumes_a_trial_and_tries_a_refused_one_twice(station: Station) -> None:
    words = ("--grid", "seed=0..1", "--at-once", 1, "--steps", 60)
    station.ok("sweep", _task(station), "--name", "again", *words, *SMALL[:4])
    station.wait_for_step("again-001", 1)
    kill_all(station)
    refused = station("mv", "again", "other")
    assert refused.returncode == 2 and "again is a sweep, whose trials are named after it" in refused.stderr

    (station.folder / "slow").touch()
    station.ok("resume", "again")
    eventually("the check of its trial", (station.folder / "checks").exists)
    station.ok("stop", "again")
    for name in ("again", "again-001"):
        assert station.wait_for_end(name)["state"] == "stopped", name
    assert len(station.record("again-001")["attempts"]) == 1 and not (station.runs / "again-002").exists()

    (station.folder / "slow").unlink()
    (station.folder / "refuse").touch()
    station.ok("resume", "again")
    record = station.wait_for_end("again")
    assert record["state"] == "finished" and "1 of 2 trials failed (again-001)" in record["reason"], record
    assert "its data are gone" in record["refused_trials"]["again-001"]
    assert len(station.record("again-001")["attempts"]) == 1
    assert station.record("again-002")["state"] == "finished"

"""The scripts that start a run on one machine or several, with torchrun itself too."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.train.conftest import PATIENCE, Station
from tests.waiting import eventually
from train.run import states

pytestmark = pytest.mark.turns

SCRIPTS = Path(__file__).parents[3] / "scripts"
FIELDS = ["--steps", "12", "--batch_size", "60", "--cpu_threads", "1", "--log.tensorboard", "false"]


def call(station: Station, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPTS / script), *arguments], env=station.environment(), capture_output=True, text=True,
        stdin=subprocess.DEVNULL, timeout=PATIENCE, check=False,
    )  # fmt: skip


def wait_for_end(station: Station, name: str) -> dict[str, object]:
    eventually(
        "the run has begun and ended", lambda: station.run(name).folder.exists() and not station.run(name).alive()
    )
    return station.wait_for_end(name)


@pytest.mark.never_forgiven
def test_a_task_under_torchrun_in_tmux_ends_like_a_launched_one(station: Station) -> None:
    place = ["--runs", str(station.runs)]
    done = call(station, "run-single-node.sh", "--torchrun", "digits", "--name", "by-torchrun", *FIELDS, *place)
    assert (done.returncode, done.stdout) == (0, "by-torchrun\n"), done.stderr
    assert "tmux -L torchrun-by-torchrun attach" in done.stderr
    record = wait_for_end(station, "by-torchrun")
    station.ok("run", "digits", "--name", "ours", "--spawn", 2, *FIELDS)
    assert record["state"] == states.FINISHED and record["world_size"] == 2
    assert record["weights_sha256"] == station.record("ours")["weights_sha256"]


def test_two_machines_under_torchrun_are_told_what_they_cannot_have(station: Station) -> None:
    hosts = ["--torchrun", "--hosts", "localhost,127.0.0.1", "--rank", "0", "--port", str(free_port())]
    done = call(station, "train-multinode.sh", *hosts, "--min", "1", "digits")
    assert done.returncode == 2 and "--min is for train launch" in done.stderr
    done = call(station, "train-multinode.sh", *hosts, "--resume", "a")
    assert done.returncode == 2 and "leave out --torchrun" in done.stderr

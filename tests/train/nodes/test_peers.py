"""How long peers of a dead rank live: no longer than they may have something to say."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from train.run import folders
from train.supervise import health
from train.supervise.health import TaskHealth


@pytest.fixture
def ranks() -> Iterator[list[subprocess.Popen[bytes]]]:
    made = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    yield made
    for process in made:
        process.kill()
        process.wait()


def seconds_of_the_peer(
    tmp_path: Path, ranks: list[subprocess.Popen[bytes]], number: int, code: int | None = None
) -> float:
    """How long one rank lives after the other has been ended by this signal, or been seen to end with this code."""
    run = folders.create(
        tmp_path, "a", files={"config.toml": b"[watch]\n"}, record={"step": 0, "epoch": 0, "world_size": 2}
    )
    run.logs(1).mkdir(parents=True)
    looks_after = TaskHealth(run.read_config(), run.logs(1), [0, 1])
    pids = [process.pid for process in ranks]
    looks_after.look(pids, pids, {}, False)
    assert not looks_after.is_ending
    os.kill(pids[0], number)
    ranks[0].wait()
    began = time.monotonic()
    while ranks[1].poll() is None and time.monotonic() - began < 20:
        looks_after.look(pids[1:], pids, {0: -number if code is None else code}, False)
        time.sleep(0.02)
    assert ranks[1].poll() == -signal.SIGKILL
    return time.monotonic() - began


def test_peers_of_a_killed_rank_are_killed(tmp_path: Path, ranks: list[subprocess.Popen[bytes]]) -> None:
    assert seconds_of_the_peer(tmp_path, ranks, signal.SIGKILL) >= 0.2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGABRT, None), (signal.SIGKILL, 1)], ids=["aborted", "failed"])
def test_peers_of_a_rank_that_failed_have_the_time_to_speak(
    tmp_path: Path, ranks: list[subprocess.Popen[bytes]], number: int, code: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "GRACE_AFTER_FAILURE", 0.8)
    assert seconds_of_the_peer(tmp_path, ranks, number, code) >= 0.8

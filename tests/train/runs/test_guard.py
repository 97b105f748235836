"""How long peers of a dead rank live: no longer than they may have something to leave behind, or to say."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from train.checkpoint.shared import Owned, Slots
from train.record import folders
from train.runs.guard import OfTask


@pytest.fixture
def ranks() -> Iterator[list[subprocess.Popen[bytes]]]:
    made = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    yield made
    for process in made:
        process.kill()
        process.wait()


def seconds_of_the_peer(
    tmp_path: Path, ranks: list[subprocess.Popen[bytes]], device: str, number: int, code: int | None = None,
    step: int = 5, is_written: bool = False,
) -> float:  # fmt: skip
    """How long one rank lives after the other has been ended by this signal, or been seen to end with this code."""
    record = {"step": 0, "epoch": 0, "world_size": 2, "device": device}
    run = folders.create(tmp_path, "a", {"config.toml": b"[watch]\n"}, record)
    run.logs(1).mkdir(parents=True)
    kept = Owned()
    slots = Slots(kept.address)
    assert slots.write(step, b"", iter(()))
    (run.checkpoints / "step-00000004").mkdir()
    draft = slots.open(step + 1) if is_written else None
    looks_after = OfTask(run, run.logs(1), [0, 1], kept)
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
    assert (draft is not None) == is_written
    kept.close()
    return time.monotonic() - began


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_on_gpus_peers_of_a_killed_rank_end_at_once(
    tmp_path: Path, ranks: list[subprocess.Popen[bytes]], number: int
) -> None:
    assert 0.2 <= seconds_of_the_peer(tmp_path, ranks, "cuda", number) < 2.5


@pytest.mark.parametrize(
    ("device", "number", "code"),
    [("cpu", signal.SIGKILL, None), ("cuda", signal.SIGABRT, None), ("cuda", signal.SIGKILL, 1)],
    ids=["on a cpu they leave the state behind", "one that ended itself may not be the first", "nor one that failed"],
)
def test_others_have_the_time_to_speak(
    tmp_path: Path, ranks: list[subprocess.Popen[bytes]], device: str, number: int, code: int | None
) -> None:
    assert seconds_of_the_peer(tmp_path, ranks, device, number, code) >= 3.0


def test_a_peer_may_end_what_is_not_kept_yet(tmp_path: Path, ranks: list[subprocess.Popen[bytes]]) -> None:
    """A checkpoint that is newer than what memory has may be on its way to be published."""
    assert seconds_of_the_peer(tmp_path, ranks, "cuda", signal.SIGKILL, step=4) >= 3.0


def test_a_peer_may_end_the_copy_that_it_writes(tmp_path: Path, ranks: list[subprocess.Popen[bytes]]) -> None:
    assert seconds_of_the_peer(tmp_path, ranks, "cuda", signal.SIGKILL, is_written=True) >= 3.0

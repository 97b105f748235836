"""Which GPUs a run gets, by --gpus and CUDA_VISIBLE_DEVICES, and what becomes of a run whose GPUs vanish."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.cuda.cards import uuid
from tests.cuda.conftest import GpuStation

pytestmark = pytest.mark.minutes

SHORT = ["--steps", 2, "--checkpoint.every_minutes", 0]
VISIBLE = "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("arguments", "visible", "cards"),
    [
        (["--gpus", "3,1"], None, [3, 1]),
        (["--gpus", "2,"], None, [2]),
        (["--nproc", "auto"], "2,3", [2, 3]),
        (["--gpus", "0,"], f"{uuid(3)},{uuid(1)}", [3]),
    ],
    ids=lambda value: str(value).replace(uuid(3), "UUID").replace(uuid(1), "UUID"),
)
def test_ranks_get_the_gpus_that_were_asked_for(
    machine: GpuStation, arguments: list[Any], visible: str | None, cards: list[int]
) -> None:
    env = {VISIBLE: visible} if visible else {}
    machine.ok("launch", "fake", "--name", "one", *arguments, *SHORT, "--follow", env=env)
    ranks = machine.calls("context")
    assert sorted(calls for calls in ranks.values()) == [[f"context {rank}"] for rank in range(len(cards))]
    found = {pid: calls for pid, calls in machine.calls("device").items() if pid in ranks}
    wanted = [f"device {device} is card {card}" for device, card in enumerate(cards)]
    assert list(found.values()) == ([wanted] * len(cards) if machine.record("one")["gpus"] else [])
    assert machine.record("one")["world_size"] == len(cards)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--gpus", "5"], "the usable GPUs here have ids 0 to 3"),
        (["--gpus", uuid(1)], "a UUID, also of a MIG slice, goes into CUDA_VISIBLE_DEVICES"),
        (["--nproc", "5"], "5 ranks need 5 GPUs, but 4 are usable here; use --nproc 4"),
    ],
)
def test_gpus_that_are_not_there_are_refused(machine: GpuStation, arguments: list[Any], told: str) -> None:
    done = machine("launch", "fake", "--name", "one", *arguments, *SHORT)
    assert done.returncode == 2 and told in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (machine.runs / "one").exists()


def test_a_run_whose_gpus_vanish_waits_for_them_and_may_continue_without(machine: GpuStation) -> None:
    machine.ok("launch", "fake", "--name", "one", "--gpus", "0,1", "--steps", 100000)
    machine.wait("one", lambda record: record["step"] >= 5 and "snapshots" in machine.logs("one"))
    machine.cards.keep()
    os.kill(machine.record("one")["pids"]["ranks"][0], signal.SIGKILL)
    record = machine.wait_for_end("one")
    assert record["state"] == "interrupted", record["reason"]
    assert "torch sees none here; when they are back: train resume one" in record["reason"]
    step = record["step"]
    refused = machine("resume", "one")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1, refused.stderr
    assert "one computes on GPUs, but torch sees none here" in refused.stderr
    new = machine("launch", "fake", "--name", "two", "--device", "cuda", *SHORT)
    assert new.returncode == 2 and "torch sees none here" in new.stderr and not (machine.runs / "two").exists()
    machine.cards.keep(0)
    refused = machine("resume", "one")
    assert refused.returncode == 2 and "2 ranks need 2 GPUs, but 1" in refused.stderr, refused.stderr
    assert machine.run("one").read_effective()["state"] == "interrupted"
    machine.ok("resume", "one", "--device", "cpu", "--steps", step + 3, "--follow")
    ended = machine.record("one")
    assert ended["state"] == "finished" and ended["step"] == step + 3

"""Several ranks, each with a GPU of the stand-in: what they send each other, and what a death costs.

Kernels compute nothing, so losses are 0 and the weights stay as they were at the start. What is copied, sent and saved
is real: if a copy is wrong, so is the digest of the weights.
"""

from __future__ import annotations

import functools
import os
import re
import signal
from collections import Counter
from typing import Any

import pytest
import torch

from tests.cuda.conftest import GpuStation
from train.build.objects import make_model
from train.checkpoint.state_dict import weights_of, weights_sha256
from train.launcher.request import Request, resolve

pytestmark = pytest.mark.minutes

STEPS = 6
LOGGED: list[Any] = ["--log.every_steps", 1, "--log.samples", "true"]
SIZE = 5514
"""Number of parameters of the task `fake`."""
STATS = 6
STATISTICS = 96
"""Numbers in its buffers that are averaged."""
FROM_RANK_0 = {"Broadcast(384 uint8, root 0)": STEPS, "Broadcast(16 uint8, root 0)": STEPS}
"""Its buffers, after each step."""

CASES: dict[str, tuple[int, list[Any], dict[str, int]]] = {
    # two passes before the first step lay out the buckets, and one after the last finds an unused parameter
    "ddp": (2, [], FROM_RANK_0 | {f"AllReduce({SIZE + STATS} float32, sum)": STEPS + 3}),
    "fsdp": (
        2, ["--parallel.strategy", "fsdp"],
        FROM_RANK_0 | {
            f"AllGather({SIZE // 2} float32)": STEPS + 1,  # for the forward, and for the evaluation
            f"ReduceScatter({SIZE // 2} float32, avg)": STEPS,
            f"AllReduce({STATS} float32, sum)": STEPS,
        },
    ),
    "fsdp in bf16": (
        2, ["--parallel.strategy", "fsdp", "--precision", "bf16"],
        FROM_RANK_0 | {
            f"AllGather({(SIZE - STATISTICS) // 2} bfloat16)": STEPS + 1,  # BatchNorm's weights stay in fp32
            f"ReduceScatter({(SIZE - STATISTICS) // 2} float32, avg)": STEPS,
        },
    ),
    "hsdp": (
        4, ["--parallel.strategy", "hsdp", "--parallel.shard_size", 2],
        FROM_RANK_0 | {
            f"AllGather({SIZE // 2} float32)": STEPS + 1,
            f"ReduceScatter({SIZE // 2} float32, avg)": STEPS,
            f"AllReduce({SIZE // 2} float32, sum)": STEPS,  # between the two copies
            f"AllReduce({STATS} float32, sum)": STEPS,
        },
    ),
    "ordered": (
        2, ["--parallel.reduce", "ordered"],
        FROM_RANK_0 | {f"AllReduce({SIZE + STATISTICS} float32, sum)": STEPS},
    ),
    "ordered with unequal shares": (
        2, ["--parallel.reduce", "ordered", "--micro_batch_size", 32, "--batch_size", 96],
        {"Send": STEPS, "Recv": STEPS},
    ),
    "sync_batchnorm": (
        2, ["--sync_batchnorm", "true"],
        FROM_RANK_0 | {
            f"AllReduce({SIZE + STATS} float32, sum)": STEPS + 3,
            # mean, variance and count of the 16 and 32 channels in the forward, two sums of each in the backward
            **{f"AllGather({2 * n + 1} float32)": STEPS for n in (16, 32)},
            **{f"AllReduce({2 * n} float32, sum)": STEPS for n in (16, 32)},
        },
    ),
}  # fmt: skip
"""By strategy: the number of ranks, the flags, and how often each rank makes these calls in a run of STEPS steps."""


@pytest.mark.parametrize("case", CASES)
def test_each_rank_makes_the_same_calls_on_its_own_gpu(machine: GpuStation, case: str) -> None:
    ranks, flags, wanted = CASES[case]
    machine.ok("run", "fake", "--name", "one", "--spawn", ranks, "--steps", STEPS, *LOGGED, *flags)
    assert [line["step"] for line in machine.metrics("one") if "loss" in line] == [*range(1, STEPS + 1)]
    assert len({len(ids) for ids in machine.samples("one").values()}) == 1
    opened = sorted(calls for calls in machine.calls("context").values())
    assert opened == [[f"context {rank}"] for rank in range(ranks)]
    assert not machine.calls("after-fork", "bad-launch", "out-of-bounds")
    assert machine.record("one")["weights_sha256"] == _first_weights()
    for made in _collectives(machine).values():
        assert wanted.items() <= made.items(), made


@functools.cache
def _first_weights() -> str:
    """The digest of the weights that a run begins with."""
    task, config = resolve(Request(task="fake", flags={}))
    return weights_sha256(weights_of(make_model(task, config, torch.float32)), True)


def _collectives(machine: GpuStation) -> dict[int, Counter[str]]:
    """How often each process made which collective."""
    parts = {pid: [call for call in calls if " rank " in call] for pid, calls in machine.calls("nccl").items()}
    return {
        pid: Counter(re.sub(r"^nccl (.*) rank .*", r"\1", call) for call in calls if "CommInit" not in call)
        for pid, calls in parts.items()
    }


def test_a_killed_rank_costs_the_steps_since_the_copy_in_memory_and_all_killed_those_since_the_disk(
    machine: GpuStation,
) -> None:
    machine.ok(
        "launch", "fake", "--name", "one", "--gpus", 2, "--steps", 100000, "--checkpoint.every_minutes", 0,
        "--checkpoint.every_steps", 100000, "--data.workers", 1, *LOGGED,
    )  # fmt: skip
    machine.wait("one", lambda record: record["step"] >= 1 and "snapshots" in machine.logs("one"))
    machine.wait_for_step("one", machine.record("one")["step"] + 30)
    before = machine.record("one")
    os.kill(before["pids"]["ranks"][1], signal.SIGKILL)
    machine.wait("one", lambda record: len(record["attempts"]) == 2 and record["step"] > before["step"])
    again = machine.record("one")["attempts"][1]
    assert again["from_step"] > 0, machine.logs("one")
    assert not list((machine.runs / "one" / "checkpoints").glob("step-*"))
    machine.ok("stop", "one")  # the flag that all stop goes through a collective
    stopped = machine.wait_for_end("one")
    assert stopped["state"] == "stopped" and stopped["step"] >= again["from_step"]
    machine.ok("resume", "one", "--steps", stopped["step"] + 100000)
    machine.wait_for_step("one", stopped["step"] + 3)
    pids = machine.record("one")["pids"]
    for pid in (pids["agent"], *pids["ranks"]):
        os.kill(pid, signal.SIGKILL)
    assert machine.wait_for_end("one")["state"] == "interrupted"
    end = stopped["step"] + 5
    machine.ok("resume", "one", "--steps", end, "--follow")
    record = machine.record("one")
    assert record["state"] == "finished" and record["weights_sha256"] == _first_weights()
    assert [attempt["from_step"] for attempt in record["attempts"][2:]] == [stopped["step"]] * 2
    assert [line["step"] for line in machine.metrics("one") if "loss" in line] == [*range(1, end + 1)]
    assert [len(ids) for ids in machine.samples("one").values()] == [64] * end
    for opened in machine.calls("context").values():  # threads begin on the first GPU
        assert len(opened) == 1, opened
    assert not machine.calls("after-fork", "bad-launch", "out-of-bounds")

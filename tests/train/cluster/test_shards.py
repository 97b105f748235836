"""A model that is spread over machines: its checkpoints lie in a folder of runs that all machines share."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.train.cluster.conftest import Machines, OnSharedFolder
from train.checkpoint import manifest as manifests

FSDP = ("--parallel.strategy", "fsdp", "--parallel.wrap", "Linear")
HSDP = ("--parallel.strategy", "hsdp", "--parallel.shard_size", 2)


@pytest.mark.minutes
def test_both_nodes_write_one_checkpoint_and_a_killed_rank_goes_on_from_parts_in_memory(
    shared: OnSharedFolder, like_alone: Any
) -> None:
    shared.launch("a", 1, "--steps", 400, *FSDP, "--checkpoint.every_steps", 1000)  # in any order
    shared.launch("a", 0, "--steps", 400, *FSDP, "--checkpoint.every_steps", 1000)
    shared.stations[0].wait_for_step("a", 80)
    os.kill(shared.stations[1].record("a")["pids"]["ranks"][0], signal.SIGKILL)
    like_alone(shared, "a", 2, 400, *FSDP)
    begun = [[(try_["reason"], try_["from_step"]) for try_ in s.record("a")["attempts"]] for s in shared.stations]
    assert begun[0][0][0] == "rank 1 died of SIGKILL", begun  # a connection that the system resets is one more
    steps = [[step for _, step in each[1:]] for each in begun]
    assert steps[0] == steps[1] and min(steps[0]) > 0, begun  # no checkpoint was there to begin from
    last = shared.stations[0].run("a").checkpoint(400)
    manifests.verify(last)
    assert {path.name for path in last.glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}
    assert not shared.stations[1].run("a").steps_saved()


@pytest.mark.minutes
def test_whole_nodes_are_killed_and_the_steps_since_the_last_checkpoint_are_made_again(
    shared: OnSharedFolder, like_alone: Any
) -> None:
    shared.launch_all("a", "--steps", 400, *HSDP, nproc=2)
    for node, step in ((1, 70), (0, 180)):
        shared.wait("a", 0, lambda record, step=step: record["step"] >= step, f"step {step}")  # type: ignore[misc]
        shared.kill("a", node)
        shared.wait_for_reason("a", 1 - node, f"waiting for node {node} of 2")
        command = ("resume", "a", "--runs", shared.shared) + (("--node-rank", 1) if node else ())
        shared.stations[node].ok(*command)
    like_alone(shared, "a", 4, 400, *HSDP)
    begun = [attempt["from_step"] for attempt in shared.stations[0].record("a")["attempts"]]
    assert len(begun) == 3 and begun == sorted(begun) and all(step and step % 50 == 0 for step in begun[1:]), begun


@pytest.mark.minutes
def test_machines_that_share_no_folder_are_refused_with_what_helps(machines: Machines) -> None:
    assert machines.launch("a", 0, "--steps", 60, *FSDP, "--wait-minutes", 1).returncode == 0
    done = machines.launch("a", 1, "--steps", 60, *FSDP, "--follow")
    said = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and "one --runs among all machines" in said and "ddp" in said, done.stderr
    machines.wait_for_reason("a", 0, "it was refused")
    assert machines.stations[1]("show", "a").stdout.startswith("a: failed: node 1")  # where it was put aside
    machines.stations[0].ok("stop", "a")

"""A model that is spread over machines: each machine has whole checkpoints all the same."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.train.cluster.conftest import FIELDS, Machines, digest_of, wait_until
from tests.train.conftest import Station
from train.record import manifest as manifests

FSDP = ("--parallel.strategy", "fsdp", "--parallel.wrap", "Linear")
HSDP = ("--parallel.strategy", "hsdp", "--parallel.shard_size", 2)


def checkpoints(station: Station, name: str) -> dict[int, str]:
    """What the whole checkpoints of a machine hold, by step."""
    run = station.run(name)
    for step in run.steps_saved():
        manifests.verify(run.checkpoint(step))
    return {step: digest_of(run.checkpoint(step)) for step in run.steps_saved()}


def unfinished(station: Station, name: str) -> list[str]:
    return [path.name for path in station.run(name).checkpoints.glob(".*")]


@pytest.mark.minutes
def test_each_machine_has_every_shard_and_trains_as_one_machine_does(machines: Machines, like_alone: Any) -> None:
    machines.launch_all("a", "--steps", 60, *FSDP)
    like_alone(machines, "a", 2, 60, *FSDP)
    first, second = (checkpoints(station, "a") for station in machines.stations)
    assert first == second and list(first) == [60, 50]  # to the byte, manifest and mark too
    names = {path.name for path in machines.stations[1].run("a").checkpoint(60).iterdir()}
    assert names == {".metadata", "__0_0.distcp", "__1_0.distcp", manifests.MANIFEST}
    assert not unfinished(machines.stations[0], "a") and not unfinished(machines.stations[1], "a")


def wait_for_saved(machines: Machines, node: int, step: int, saved: int) -> None:
    def is_there(record: dict[str, Any]) -> bool:
        return bool(record["step"] >= step and record.get("saved_step", 0) >= saved)

    machines.wait("a", node, is_there, f"step {step}, and {saved} saved")


@pytest.mark.minutes
def test_whole_nodes_are_killed_and_the_steps_since_the_last_checkpoint_are_made_again(
    machines: Machines, like_alone: Any
) -> None:
    machines.launch_all("a", "--steps", 400, *HSDP, nproc=2)
    wait_for_saved(machines, 0, 70, 50)
    machines.kill("a", 1)
    machines.wait_for_reason("a", 0, "waiting for node 1 of 2")
    machines.stations[1].ok("resume", "a")
    wait_for_saved(machines, 1, 180, 150)
    machines.kill("a", 0)  # where the others come to
    machines.wait_for_reason("a", 1, "waiting for node 0 of 2")
    # the disk of the one that comes back is new: it has the folder, and nothing of what was saved
    shutil.rmtree(machines.stations[0].run("a").checkpoints)
    machines.stations[0].ok("resume", "a")
    like_alone(machines, "a", 4, 400, *HSDP)
    for station in machines.stations:  # where a machine holds a whole copy, nothing is sent to it
        shards = list(station.run("a").checkpoint(400).glob("*.distcp"))
        assert len(shards) == 2
    attempts = machines.stations[1].record("a")["attempts"]
    begun = [attempt["from_step"] for attempt in attempts]
    assert len(begun) == 3 and begun == sorted(begun) and all(step and step % 50 == 0 for step in begun[1:]), begun


@pytest.mark.minutes
def test_a_rank_is_killed_and_all_go_on_from_their_parts_in_memory(machines: Machines, like_alone: Any) -> None:
    victim = 1
    seldom = ("--checkpoint.every_steps", 1000)
    machines.launch_all("a", "--steps", 400, *FSDP, *seldom)
    reached = 0
    for _ in range(2):
        machines.wait("a", victim, lambda record: record["step"] >= reached + 80, "eighty steps more")  # noqa: B023
        reached = machines.stations[victim].record("a")["step"]
        os.kill(machines.stations[victim].record("a")["pids"]["ranks"][0], signal.SIGKILL)
        machines.wait("a", victim, lambda record: record["step"] > reached + 5, "a step that was not made")  # noqa: B023
    like_alone(machines, "a", 2, 400, *FSDP)
    begun = [[attempt["from_step"] for attempt in station.record("a")["attempts"]] for station in machines.stations]
    assert begun[0] == begun[1] and len(begun[0]) == 3, begun
    assert 0 < begun[0][1] < begun[0][2], begun  # no checkpoint was there to begin from


@pytest.mark.minutes
def test_a_machine_is_lost_for_good_and_the_other_one_has_all(machines: Machines, alone: Any) -> None:
    left = 1
    exact = ("--precision", "fp64")
    machines.launch_all("a", "--steps", 300, *FSDP, *exact)
    wait_for_saved(machines, left, 130, 100)
    for node in (1 - left, left):
        machines.kill("a", node)
    shutil.rmtree(machines.stations[1 - left].runs)
    station = machines.stations[left]
    station.wait_for_end("a")
    station.ok("resume", "a", "--nnodes", 1, "--follow")
    record, whole = station.record("a"), alone(1, 300, *exact)
    assert record["state"] == "finished" and record["attempts"][-1]["from_step"] >= 100
    ours, theirs = ([line["loss"] for line in one.metrics(name) if "loss" in line]
                    for one, name in ((station, "a"), (whole, "1-300-fp64")))  # fmt: skip
    assert ours == pytest.approx(theirs, rel=1e-9)
    assert station.run("a").steps_saved()[0] == 300


@pytest.mark.minutes
def test_a_rank_that_dies_while_shards_are_exchanged_publishes_nothing(machines: Machines, like_alone: Any) -> None:
    victim = 1
    # a save is three pieces, two of them of node 0: every attempt but the last dies in its second save
    fault = {"TRAIN_FAULT": f"sent@{victim}:5"}
    disk = ("--checkpoint.snapshots", "false")
    machines.launch_all("a", "--steps", 200, *FSDP, *disk, env=fault)
    like_alone(machines, "a", 2, 200, *FSDP)
    attempts = machines.stations[0].record("a")["attempts"]
    assert [attempt["from_step"] for attempt in attempts] == [0, 50, 100, 150]
    assert attempts[0]["reason"] == f"rank {victim} died of SIGKILL"
    first, second = (checkpoints(station, "a") for station in machines.stations)
    assert first == second and max(first) == 200


@pytest.mark.minutes
def test_a_machine_without_room_for_the_shards_of_another_fails_the_checkpoint_on_all(machines: Machines) -> None:
    task = Path(__file__).with_name("wide.py")
    fields = ("--steps", 500, *FSDP, "--task.width", 4_000)
    machines.launch_all("a", *fields, task=task)
    first = machines.stations[0].run("a")
    wait_until(lambda: bool(first.steps_saved()), "a checkpoint")
    sizes = {path.name: path.stat().st_size for path in first.checkpoint(first.steps_saved()[0]).iterdir()}
    # as with a quota: rank 1 can write its own shard, and not that of rank 0, which has a whole layer more
    assert sizes["__0_0.distcp"] > sizes["__1_0.distcp"] + 32768
    pid = machines.stations[1].record("a")["pids"]["ranks"][0]
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (sizes["__1_0.distcp"] + 16384, resource.RLIM_INFINITY))
    logs = [
        station.runs / "a" / "logs" / "attempt-1" / f"rank{rank}.log" for rank, station in enumerate(machines.stations)
    ]
    for log in logs:  # it is told on both, and training goes on
        wait_until(lambda log=log: log.read_text().count("could not be saved") > 1, "a save that fails")  # type: ignore[misc]
    saved = [set(station.run("a").steps_saved()) for station in machines.stations]
    assert saved[0] == saved[1]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
    wait_until(lambda: max(first.steps_saved()) > max(saved[0]), "a save that succeeds")
    ends = machines.ends("a")
    assert [record["state"] for record in ends] == ["finished", "finished"] and len(ends[0]["attempts"]) == 1
    alone = machines.stations[0]
    alone.ok("launch", task, "--name", "alone", "--nproc", 2, *FIELDS, *fields, "--follow")
    assert {record["weights_sha256"] for record in ends} == {alone.record("alone")["weights_sha256"]}

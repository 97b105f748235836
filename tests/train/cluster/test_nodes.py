"""A run over several machines ends as one on one machine, whatever dies on the way."""

from __future__ import annotations

import os
import shutil
import signal
from typing import Any

import pytest

from tests.train.cluster.conftest import FIELDS, Machines, consumed
from tests.train.conftest import Station


def test_two_nodes_wait_for_each_other_and_train_as_one_machine_does(machines: Machines, like_alone: Any) -> None:
    assert machines.launch("a", 1, "--steps", 60, nproc=2).stdout == "a\n"  # in any order
    reason = machines.wait_for_reason("a", 1, "waiting for node 0 of 2")["reason"]
    assert machines.rendezvous in reason
    assert machines.launch("a", 0, "--steps", 60, nproc=2).returncode == 0
    like_alone(machines, "a", 4, 60)
    for node, station in enumerate(machines.stations):
        logs = {path.name for path in (station.runs / "a" / "logs" / "attempt-1").glob("rank*.log")}
        assert logs == {f"rank{2 * node}.log", f"rank{2 * node + 1}.log"}  # numbered over all nodes


def test_two_ranks_on_each_of_two_nodes_add_in_one_order(machines: Machines, shared_station: Station) -> None:
    fields = ("--steps", 30, "--parallel.reduce", "ordered")
    machines.launch_all("a", *fields, nproc=2)
    shared_station.ok("launch", "digits", "--name", "ordered30", "--nproc", 1, *FIELDS, *fields, "--follow")
    digest = shared_station.record("ordered30")["weights_sha256"]
    assert [record["weights_sha256"] for record in machines.ends("a")] == [digest, digest]


@pytest.mark.minutes
def test_a_rank_and_whole_nodes_are_killed_and_nothing_is_lost(machines: Machines, like_alone: Any) -> None:
    machines.launch_all("a", "--steps", 900)
    machines.stations[0].wait_for_step("a", 120)
    machines.kill_rank("a", 1)
    machines.wait("a", 0, lambda record: len(record["attempts"]) == 2 and record["attempts"][1]["ready"], "attempt 2")
    machines.stations[0].wait_for_step("a", 300)
    machines.kill("a", 1)
    machines.wait_for_reason("a", 0, "waiting for node 1 of 2")
    machines.stations[1].ok("resume", "a")
    machines.stations[1].wait_for_step("a", 500)
    machines.kill("a", 0)  # where the others come to
    machines.wait_for_reason("a", 1, "waiting for node 0 of 2")
    machines.stations[0].ok("resume", "a")
    like_alone(machines, "a", 2, 900)
    attempts = machines.stations[0].record("a")["attempts"]
    assert attempts[0]["reason"] == "rank 1 died of SIGKILL"
    assert "node 1" in attempts[1]["reason"] and "gone" in attempts[1]["reason"]
    # a survivor had the state in memory
    assert [one["to_step"] for one in attempts[:-1]] == [two["from_step"] for two in attempts[1:]]


@pytest.mark.minutes
def test_a_node_that_stands_still_is_given_up_and_comes_back(machines: Machines, like_alone: Any) -> None:
    machines.launch_all("a", "--steps", 900)
    machines.stations[0].wait_for_step("a", 100)
    pids = machines.stations[1].record("a")["pids"]
    stopped = [pids["agent"], *pids["ranks"]]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    machines.wait_for_reason("a", 0, "waiting for node 1 of 2")
    for pid in reversed(stopped):
        os.kill(pid, signal.SIGCONT)
    like_alone(machines, "a", 2, 900)


@pytest.mark.minutes
@pytest.mark.parametrize("snapshots", ["true", "false"], ids=["memory", "disk"])
def test_a_node_with_a_new_disk_dies_when_it_has_the_state_of_the_other_and_has_its_lines_too(
    machines: Machines, like_alone: Any, snapshots: str
) -> None:
    machines.launch_all("a", "--steps", 500, "--checkpoint.snapshots", snapshots)
    machines.wait("a", 0, lambda record: record.get("saved_step", 0) >= 50, "step 50 saved")
    machines.kill("a", 1)
    machines.wait_for_reason("a", 0, "waiting for node 1 of 2")
    run = machines.stations[1].run("a")
    shutil.rmtree(run.checkpoints)
    run.metrics.unlink()
    machines.stations[1].ok("resume", "a", env={"TRAIN_FAULT": "taken@1"})
    like_alone(machines, "a", 2, 500)
    attempts = run.read()["attempts"]
    assert [one["reason"] for one in attempts[1:]] == ["rank 1 died of SIGKILL", ""], attempts
    assert attempts[-1]["from_step"] >= 50


@pytest.mark.minutes
def test_a_stop_on_any_node_saves_on_all_and_they_go_on_together(machines: Machines, like_alone: Any) -> None:
    machines.launch_all("a", "--steps", 500)
    machines.stations[0].wait_for_step("a", 60)
    machines.stations[1].ok("stop", "a")
    ends = machines.ends("a")
    assert [record["state"] for record in ends] == ["stopped", "stopped"]
    assert [record["stopped_by"] for record in ends] == ["user", "user"]
    first, second = (station.run("a").steps_saved()[0] for station in machines.stations)
    assert first == second == ends[0]["step"]
    # one of them has lost its newest checkpoint, and gets it from the other
    newest = machines.stations[0].run("a").checkpoint(first)
    newest.rename(newest.with_name("gone"))
    for node in (1, 0):
        machines.stations[node].ok("resume", "a")
    like_alone(machines, "a", 2, 500)
    assert machines.stations[0].record("a")["attempts"][1]["from_step"] == first


@pytest.mark.minutes
def test_the_newest_checkpoint_is_damaged_on_both_and_an_older_one_on_one(machines: Machines, like_alone: Any) -> None:
    machines.launch_all("a", "--steps", 500)
    machines.stations[0].wait_for_step("a", 130)
    machines.stations[1].ok("stop", "a")
    machines.ends("a")
    runs = [station.run("a") for station in machines.stations]
    newest, older = runs[0].steps_saved()[:2]
    for run in runs:
        shard = next(run.checkpoint(newest).glob("*.distcp"))
        shard.write_bytes(shard.read_bytes()[:-1])
    (runs[0].checkpoint(older) / "manifest.json").write_text("{")
    for node in (0, 1):
        assert "is damaged and not used" in machines.stations[node].ok("resume", "a").stderr
    like_alone(machines, "a", 2, 500)
    assert [run.read()["attempts"][1]["from_step"] for run in runs] == [older, older]


def test_a_stop_while_a_node_waits_ends_it(machines: Machines) -> None:
    assert machines.launch("a", 0, "--steps", 60).returncode == 0
    machines.wait_for_reason("a", 0, "waiting for node 1 of 2")
    machines.stations[0].ok("stop", "a")
    record = machines.stations[0].wait_for_end("a")
    assert (record["state"], record["stopped_by"]) == ("stopped", "user")


@pytest.mark.minutes
def test_a_keeper_that_waits_again_and_again_for_a_machine_never_fails_the_run(machines: Machines) -> None:
    station = machines.stations[0]
    assert machines.launch("a", 0, "--steps", 60, "--wait-minutes", 0.01).returncode == 0
    for _ in range(6):
        record = station.wait_for_end("a")
        assert record["state"] == "interrupted" and "gave up after" in record["reason"], record["reason"]
        station.ok("keeper", "--once")
    station.wait_for_end("a")
    station.run("a").update(lambda record: record["cluster"].update(wait_minutes=30))
    station.ok("keeper", "--once")
    assert machines.launch("a", 1, "--steps", 60).returncode == 0
    assert [record["state"] for record in machines.ends("a")] == ["finished", "finished"]


@pytest.mark.minutes
def test_an_elastic_run_goes_on_without_a_node_and_takes_it_back_with_the_same_bits(
    machines: Machines, shared_station: Station
) -> None:
    fields = ("--steps", 1000, "--parallel.reduce", "ordered")  # the same bits on any number of ranks
    assert machines.launch("a", 0, *fields, nnodes="1:2").returncode == 0
    machines.stations[0].wait_for_step("a", 100)  # alone
    assert machines.launch("a", 1, *fields, nnodes="1:2").returncode == 0
    machines.wait("a", 1, lambda record: record["step"] >= 300, "step 300 on two nodes")
    machines.kill("a", 1)
    machines.wait("a", 0, lambda record: len(record["attempts"]) == 3 and record["attempts"][2]["ready"], "alone again")
    machines.stations[1].ok("resume", "a")
    shared_station.ok("launch", "digits", "--name", "ordered", *FIELDS, *fields, "--follow")
    for record in machines.ends("a"):
        assert record["weights_sha256"] == shared_station.record("ordered")["weights_sha256"]
    assert consumed(*machines.stations, name="a") == consumed(shared_station, name="ordered")
    attempts = machines.stations[0].record("a")["attempts"]
    assert [one["world_size"] for one in attempts][:3] == [1, 2, 1]
    assert [one["to_step"] for one in attempts[:-1]] == [two["from_step"] for two in attempts[1:]]

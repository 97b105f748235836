"""A run over several machines ends as one on one machine, whatever dies on the way."""

from __future__ import annotations

import itertools
import time
from typing import Any

import psutil
import pytest

from tests.tasks import TASKS
from tests.train.cluster.conftest import FIELDS, Machines, consumed, name_alone
from tests.train.conftest import Station
from train.run import ownership


@pytest.mark.minutes
def test_two_nodes_wait_for_each_other_and_train_as_one_machine_does(machines: Machines, like_alone: Any) -> None:
    assert machines.launch("a", 1, "--steps", 60, nproc=2).stdout == "a\n"  # in any order
    reason = machines.wait_for_reason("a", 1, "waiting for node 0 of 2")["reason"]
    assert machines.rendezvous in reason
    assert machines.launch("a", 0, "--steps", 60, nproc=2).returncode == 0
    like_alone(machines, "a", 4, 60)
    for node, station in enumerate(machines.stations):
        logs = {path.name for path in (station.runs / "a" / "logs" / "attempt-1").glob("rank*.log")}
        assert logs == {f"rank{2 * node}.log", f"rank{2 * node + 1}.log"}  # numbered over all nodes


@pytest.mark.minutes
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
    machines.wait("a", 0, lambda record: len(record["attempts"]) >= 2 and record["attempts"][-1]["ready"], "attempt 2")
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
    reasons = [one["reason"] for one in attempts]  # a connection that the system resets is one more
    assert "rank 1 died of SIGKILL" in reasons, reasons
    assert any("node 1" in reason and "gone" in reason for reason in reasons), reasons
    assert all(one["from_step"] for one in attempts[1:])  # the first machine had a copy in memory


def suspend(machines: Machines, name: str, node: int) -> list[psutil.Process]:
    """Let a node stand still. Returns its processes, in the order in which they are to go on."""
    pids = machines.stations[node].record(name)["pids"]
    agent = psutil.Process(pids["agent"])
    stopped = [agent, *map(psutil.Process, pids["ranks"])]
    if (parent := agent.parent()) is not None and "tmux" in parent.name():
        stopped.insert(0, parent)  # it would let its child go on at once
    for process in stopped:
        process.suspend()
    return stopped[::-1]


@pytest.mark.minutes
def test_a_node_that_stands_still_is_given_up_and_comes_back(machines: Machines, like_alone: Any) -> None:
    machines.launch_all("a", "--steps", 900)
    machines.stations[0].wait_for_step("a", 100)
    stopped = suspend(machines, "a", 1)
    machines.wait_for_reason("a", 0, "waiting for node 1 of 2")
    time.sleep(1)  # in which node 0 takes back what it has said of the attempt
    for process in stopped[1:]:  # its rank stays, like one that never hears that rank 0 is dead
        process.resume()
    like_alone(machines, "a", 2, 900)


@pytest.mark.minutes
def test_a_stop_on_any_node_saves_on_all_and_they_go_on_together(machines: Machines, like_alone: Any) -> None:
    machines.launch_all("a", "--steps", 500)
    machines.stations[0].wait_for_step("a", 60)
    machines.stations[1].ok("stop", "a")
    ends = machines.ends("a")
    assert [record["state"] for record in ends] == ["stopped", "stopped"]
    assert [record["stopped_by"] for record in ends] == ["user", "user"]
    saved = [station.run("a").steps_saved()[:1] for station in machines.stations]
    assert saved == [[ends[0]["step"]], []] and ends[1]["step"] == ends[0]["step"]  # node 0 has the checkpoints
    alone = machines.stations[1]("resume", "a", "--nnodes", 1)
    assert alone.returncode == 2 and "node 0" in alone.stderr, alone.stderr
    for node in (1, 0):
        machines.stations[node].ok("resume", "a")
    like_alone(machines, "a", 2, 500)
    assert machines.stations[0].record("a")["attempts"][1]["from_step"] == ends[0]["step"]


@pytest.mark.minutes
def test_a_stop_at_once_ends_that_nodes_part_alone(machines: Machines, like_alone: Any) -> None:
    machines.launch_all("a", "--steps", 900)
    machines.stations[0].wait_for_step("a", 60)
    machines.stations[1].ok("stop", "a", "--now")
    assert machines.stations[1].wait_for_end("a")["state"] == "stopped"
    machines.wait_for_reason("a", 0, "waiting for node 1 of 2")
    machines.stations[1].ok("resume", "a")
    like_alone(machines, "a", 2, 900)


@pytest.mark.minutes
def test_a_task_that_fails_on_one_node_ends_the_run_on_all_with_its_reason(machines: Machines) -> None:
    text = (TASKS / "few_numbers.py").read_text()
    bad = """
import os
def metrics(model, batch):
    if os.environ["RANK"] == "1":
        raise ValueError("of one rank alone")
    return {}
"""
    for station in machines.stations:
        (station.folder / "t.py").write_text(
            text.replace(", None", ",) * 2").replace("return TensorDataset", "return (TensorDataset") + bad
        )
    fields = ("--batch_size", 8, "--cpu_threads", 1)
    machines.launch_all("a", "--steps", 30, task="t.py", fields=fields)
    for record in machines.ends("a"):
        assert record["state"] == "failed" and "rank 1" in record["reason"] and "of one rank alone" in record["reason"]


@pytest.mark.minutes
def test_another_node_computes_as_node_0_has_chosen(machines: Machines, alone: Any) -> None:
    at = FIELDS.index("--cpu_threads")
    unset = FIELDS[:at] + FIELDS[at + 2 :]
    for node in (1, 0):
        assert (
            machines.launch("a", node, "--steps", 60, fields=unset, env={"OMP_NUM_THREADS": f"{node + 1}"}).returncode
            == 0
        )
    for station, record in zip(machines.stations, machines.ends("a"), strict=True):
        assert record["state"] == "finished", record["reason"]
        assert "cpu_threads = 1\n" in (station.run("a").folder / "config.toml").read_text()
        assert record["weights_sha256"] == alone(2, 60).record(name_alone(2, 60))["weights_sha256"]
        assert ownership.was_started_here(station.run("a").folder, station.run("a").read())


@pytest.mark.minutes
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
    run = station.run("a")
    run.update(lambda record: record["cluster"].update(wait_minutes=30))
    run.update(**ownership.sign(run.folder, run.read()))
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
    # from the last copy of the state, never from a checkpoint: those are every 50 steps
    assert all(0 <= one["to_step"] - two["from_step"] < 50 for one, two in itertools.pairwise(attempts))

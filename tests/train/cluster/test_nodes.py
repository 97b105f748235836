"""A run over several machines ends as one on one machine, whatever dies on the way."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.train.cluster.conftest import FIELDS, Machines, consumed, name_alone, wait_until
from tests.train.conftest import Station
from train.cluster.table import LOST
from train.record import manifest as manifests
from train.record import station as stations

PTRACE_CONT, PTRACE_DETACH, PTRACE_SEIZE, PTRACE_INTERRUPT, WALL = 7, 17, 0x4206, 0x4207, 0x40000000
"""Of <sys/ptrace.h> and <sys/wait.h>."""


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
    assert all(one["from_step"] for one in attempts[1:])  # the first machine had a copy in memory


@pytest.mark.minutes
def test_a_node_that_stands_still_is_given_up_and_comes_back(machines: Machines, like_alone: Any) -> None:
    machines.launch_all("a", "--steps", 900)
    machines.stations[0].wait_for_step("a", 100)
    pids = machines.stations[1].record("a")["pids"]
    agent = psutil.Process(pids["agent"])
    stopped = [agent, *map(psutil.Process, pids["ranks"])]
    if (parent := agent.parent()) is not None and "tmux" in parent.name():  # the agent started cold
        stopped.insert(0, parent)  # it would let its child go on at once
    for process in stopped:
        process.suspend()
    machines.wait_for_reason("a", 0, "waiting for node 1 of 2")
    for process in reversed(stopped):
        process.resume()
    like_alone(machines, "a", 2, 900)


@contextlib.contextmanager
def _standing_still(pid: int) -> Iterator[None]:
    """The main thread of a process stands in a call of the kernel, as in one of a disk that does not answer; its other
    threads go on. No file can do that to it: it never opens what could make it wait. Held by ptrace(2), then."""
    kernel = ctypes.CDLL(None, use_errno=True)

    def trace(request: int) -> None:
        if kernel.ptrace(request, pid, None, None):
            raise OSError(ctypes.get_errno(), "ptrace")

    trace(PTRACE_SEIZE)
    try:
        while True:
            is_waiting = psutil.Process(pid).status() == psutil.STATUS_SLEEPING
            trace(PTRACE_INTERRUPT)
            os.waitpid(pid, WALL)
            if is_waiting and not Path(f"/proc/{pid}/syscall").read_text().startswith("-1"):
                break  # in a call: it does not hold what Python's other threads need
            trace(PTRACE_CONT)
            time.sleep(0.01)
        yield
    finally:
        trace(PTRACE_DETACH)


@pytest.mark.minutes
def test_an_agent_whose_disk_does_not_answer_for_a_while_is_not_taken_for_gone(
    machines: Machines, like_alone: Any
) -> None:
    machines.launch_all("a", "--steps", 500)
    machines.stations[0].wait_for_step("a", 50)
    with _standing_still(machines.stations[0].record("a")["pids"]["agent"]):
        time.sleep(LOST + 8)
    like_alone(machines, "a", 2, 500)
    assert [len(station.record("a")["attempts"]) for station in machines.stations] == [1, 1]


@pytest.mark.minutes
def test_a_node_with_a_new_disk_dies_when_it_has_the_state_of_the_other_and_has_its_lines_too(
    machines: Machines, like_alone: Any
) -> None:
    machines.launch_all("a", "--steps", 500)
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
def test_a_machine_with_a_new_disk_has_the_best_checkpoint_too(machines: Machines) -> None:
    best = ("--checkpoint.best", "max:loss", "--checkpoint.keep", 1)  # the first that was evaluated
    best += ("--checkpoint.snapshots", "false")
    machines.launch_all("a", "--steps", 300, *best)
    machines.wait("a", 0, lambda record: record.get("saved_step", 0) >= 50, "step 50 saved")
    machines.kill("a", 1)
    machines.wait_for_reason("a", 0, "waiting for node 1 of 2")
    shutil.rmtree(machines.stations[1].run("a").folder)  # another machine
    assert machines.launch("a", 1, "--steps", 300, *best).returncode == 0
    first, second = machines.ends("a")
    assert first["state"] == second["state"] == "finished"
    assert first["best"] == second["best"] and first["best"]["step"] < 50, (first["best"], second["best"])
    assert first["checkpoints"] == second["checkpoints"] == [first["best"]["step"], 300]
    runs = [station.run("a") for station in machines.stations]
    one, other = (manifests.verify(run.checkpoint(first["best"]["step"])) for run in runs)
    assert one["save"] == other["save"]
    for station in machines.stations:
        station.ok("export", "a", "--checkpoint", "best", "--to", "best.safetensors")
    exported = [(station.folder / "best.safetensors").read_bytes() for station in machines.stations]
    assert exported[0] == exported[1]


@pytest.mark.minutes
def test_a_machine_whose_run_folder_is_removed_is_gone_and_another_takes_its_place(
    machines: Machines, alone: Any
) -> None:
    machines.launch_all("a", "--steps", 500)
    machines.stations[0].wait_for_step("a", 60)
    folder = machines.stations[1].run("a").folder
    pids = machines.stations[1].record("a")["pids"]
    folder.rename(folder.with_name("removed"))
    machines.wait_for_reason("a", 0, "waiting for node 1 of 2")
    wait_until(lambda: not any(map(psutil.pid_exists, [pids["agent"], *pids["ranks"]])), "the end of its processes")
    assert machines.launch("a", 1, "--steps", 500).returncode == 0
    for record in machines.ends("a"):
        assert record["state"] == "finished", record["reason"]
        assert record["weights_sha256"] == alone(2, 500).record(name_alone(2, 500))["weights_sha256"]


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


@pytest.mark.minutes
def test_a_stop_while_a_node_waits_ends_it(machines: Machines) -> None:
    assert machines.launch("a", 0, "--steps", 60).returncode == 0
    machines.wait_for_reason("a", 0, "waiting for node 1 of 2")
    machines.stations[0].ok("stop", "a")
    record = machines.stations[0].wait_for_end("a")
    assert (record["state"], record["stopped_by"]) == ("stopped", "user")


@pytest.mark.minutes
def test_a_new_node_0_computes_as_the_others_do_whatever_it_would_choose_by_itself(
    machines: Machines, alone: Any
) -> None:
    at = FIELDS.index("--cpu_threads")
    unset = FIELDS[:at] + FIELDS[at + 2 :]
    machines.launch_all("a", "--steps", 500, fields=unset, env={"OMP_NUM_THREADS": "1"})
    machines.wait("a", 1, lambda record: record.get("saved_step", 0) >= 50, "step 50 saved")
    machines.kill("a", 0)
    machines.wait_for_reason("a", 1, "waiting for node 0 of 2")
    shutil.rmtree(machines.stations[0].run("a").folder)  # another machine
    assert machines.launch("a", 0, "--steps", 500, fields=unset, env={"OMP_NUM_THREADS": "2"}).returncode == 0
    for station, record in zip(machines.stations, machines.ends("a"), strict=True):
        assert record["state"] == "finished", record["reason"]
        assert "cpu_threads = 1\n" in (station.run("a").folder / "config.toml").read_text()
        assert record["weights_sha256"] == alone(2, 500).record(name_alone(2, 500))["weights_sha256"]
    assert machines.stations[0].record("a")["attempts"][0]["from_step"] >= 50


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
    run.update(**stations.mark(run.folder, run.read()))
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

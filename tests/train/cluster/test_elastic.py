"""A run that may go on with fewer machines: they leave, come back, and the run is one all the same."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.tasks import TASKS
from tests.train.cluster.conftest import FIELDS, Machines, consumed
from tests.train.conftest import Station
from train.launcher.stopping import stop_and_wait

ORDERED = ("--steps", 1500, "--parallel.reduce", "ordered", "--task.width", 32)
"""The same bits on any number of ranks; and not over while one machine is alone for a while."""

SLOW = """
def collate(items):
    import time
    time.sleep(0.05)
    return torch.utils.data.default_collate(items)
"""


def attempts(machines: Machines, node: int, count: int) -> list[dict[str, Any]]:
    """Those of a node, once the ranks of so many have come to training."""
    record = machines.wait(
        "a", node, lambda record: len(record["attempts"]) == count and record["attempts"][-1]["ready"], f"try {count}"
    )
    return list(record["attempts"])


def leave(machines: Machines, node: int) -> dict[str, Any]:
    """What the agent of a machine that goes away is sent; how it ends there."""
    station = machines.stations[node]
    os.kill(station.record("a")["pids"]["agent"], signal.SIGTERM)
    record = station.wait_for_end("a")
    assert (record["state"], record["stopped_by"]) == ("stopped", "signal"), record["reason"]
    assert "(SIGTERM); only this node has left" in record["reason"]
    assert max(machines.stations[0].run("a").steps_saved()) == record["step"]
    return record


@pytest.mark.minutes
def test_a_machine_that_goes_away_leaves_the_run_to_the_others_and_train_stop_ends_it_on_all(
    machines: Machines, shared_station: Station
) -> None:
    machines.launch_all("a", *ORDERED, nnodes="1:2")
    machines.stations[0].wait_for_step("a", 60)
    left = leave(machines, 1)
    alone = attempts(machines, 0, 2)
    assert alone[0]["end"] == "stopped" and "leaves (SIGTERM)" in alone[0]["reason"]
    assert (alone[1]["world_size"], alone[1]["from_step"]) == (1, left["step"])
    machines.stations[1].ok("resume", "a")
    assert attempts(machines, 0, 3)[2]["world_size"] == 2
    left = leave(machines, 0)  # where the others come to: without it none goes on
    assert machines.wait_for_reason("a", 1, "waiting for node 0 of 2")["state"] == "running"
    machines.stations[0].ok("resume", "a")
    assert attempts(machines, 1, 3)[2]["from_step"] == left["step"]
    machines.stations[1].ok("stop", "a")
    ends = machines.ends("a")
    assert [(end["state"], end["stopped_by"]) for end in ends] == [("stopped", "user")] * 2
    assert ends[0]["step"] == ends[1]["step"]
    for node in (0, 1):
        machines.stations[node].ok("resume", "a")
    shared_station.ok("launch", "digits", "--name", "ordered1500", *FIELDS, *ORDERED, "--follow")
    for record in machines.ends("a"):
        assert record["state"] == "finished", record["reason"]
        assert record["weights_sha256"] == shared_station.record("ordered1500")["weights_sha256"]
    assert consumed(*machines.stations, name="a") == consumed(shared_station, name="ordered1500")


@pytest.mark.minutes
def test_a_keeper_that_ends_with_its_machine_takes_that_machine_alone_out_of_the_run(machines: Machines) -> None:
    machines.launch_all("a", *ORDERED, nnodes="1:2")
    machines.stations[0].wait_for_step("a", 60)
    stop_and_wait(machines.stations[1].run("a"), "keeper")  # as a keeper does at its end
    record = machines.stations[1].wait_for_end("a")
    assert (record["state"], record["stopped_by"]) == ("stopped", "keeper")
    assert attempts(machines, 0, 2)[1]["world_size"] == 1
    machines.stations[1].ok("keeper", "--once")
    assert attempts(machines, 0, 3)[2]["world_size"] == 2
    machines.stations[0].ok("stop", "a")


@pytest.mark.minutes
def test_a_machine_that_would_join_with_other_settings_is_refused_and_the_run_goes_on(machines: Machines) -> None:
    text = (TASKS / "few_numbers.py").read_text()
    for station in machines.stations:
        (station.folder / "t.py").write_text(text + SLOW)
    fields = ("--batch_size", 8, "--cpu_threads", 1, "--checkpoint.every_steps", 20, "--data.workers", 0)
    more = {"nnodes": "1:2", "task": "t.py", "fields": fields}
    assert machines.launch("a", 0, "--steps", 3000, **more).returncode == 0
    attempts(machines, 0, 1)
    # other settings: it is never let in
    done = machines.launch("a", 1, "--steps", 3000, "--seed", 5, "--follow", **more)
    assert done.returncode == 2 and "another configuration" in done.stderr.splitlines()[-1], done.stderr
    assert len(machines.stations[0].record("a")["attempts"]) == 1
    machines.stations[0].ok("stop", "a")

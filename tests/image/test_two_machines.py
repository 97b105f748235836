"""The profile `cluster`: a second station beside the first, and a run of both that a killed machine does not end.

What the wire between machines can do to a run is in tests/train/cluster/test_network.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from conftest import ROOT, Station, metrics_lines, run

from tests.waiting import eventually

pytestmark = pytest.mark.turns

STEPS = 150
FIELDS = ("--steps", str(STEPS), "--log.every_steps", "1", "--checkpoint.every_steps", "10", "--cpu_threads", "1")


def services(*arguments: str) -> dict[str, Any]:
    env = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    files = ("--file", "docker-compose.yml", "--file", "docker-compose.cpu.yml")
    found = run("docker", "compose", *files, *arguments, "config", "--format", "json", cwd=ROOT, env=env)
    return dict(json.loads(found.stdout)["services"])


def test_there_is_a_second_station_where_it_is_asked_for_and_nothing_of_it_is_published() -> None:
    assert "second" not in services()
    found = services("--profile", "cluster")
    first, second = found["station"], found["second"]
    assert not second.get("ports") and len(first["ports"]) == 2
    differing = {key for key in first.keys() | second.keys() if first.get(key) != second.get(key)}
    assert differing == {"hostname", "ports", "profiles", "volumes"}
    own = {one["target"]: one["source"] for one in second["volumes"] if one not in first["volumes"]}
    assert own == {"/workspace/runs": "second-runs", "/home/dev": "second-home"}


def test_a_machine_that_is_killed_comes_back_and_the_run_ends_as_on_one(make_station: Callable[..., Station]) -> None:
    pair = make_station("pair", COMPOSE_PROFILES="cluster")
    pair.make("up")

    def train(service: str, *command: str) -> str:
        inside = ("exec", "-T", "--user", "dev", "--env", "HOME=/home/dev", "--workdir", "/workspace", service, "train")
        return pair.compose(*inside, *command).stdout

    def record(service: str, name: str) -> dict[str, Any]:
        return dict(json.loads(train(service, "show", name, "--json")))

    def goes_on() -> None:
        before = metrics_lines(pair, "both")
        eventually("both take further steps", lambda: metrics_lines(pair, "both") > before + 10)

    second = pair.compose("ps", "--all", "--quiet", "second").stdout.strip()
    health = ("docker", "exec", second, "station-health")
    eventually("the second one is healthy", lambda: run(*health, check=False).stdout == "healthy\n")
    nodes = ("--name", "both", "--nproc", "1", "--nnodes", "2", "--rendezvous", "station:29400")
    for number, service in enumerate(("station", "second")):
        train(service, "launch", "digits", *nodes, "--node-rank", str(number), *FIELDS)
    goes_on()
    run("docker", "kill", second)
    text = "waiting for node 1 of 2"
    path = pair.folder / "runs" / "both" / "run.json"
    eventually(text, lambda: text in str(json.loads(path.read_text()).get("reason")))
    run("docker", "start", second)  # its keeper brings its part back
    goes_on()
    for service in ("station", "second"):
        eventually("the run is over", lambda service=service: record(service, "both")["state"] == "finished")
    train("station", "run", "digits", "--name", "one", "--spawn", "2", *FIELDS)
    alone = record("station", "one")["weights_sha256"]
    assert [record(service, "both")["weights_sha256"] for service in ("station", "second")] == [alone, alone]
    lines = [json.loads(line) for line in (pair.folder / "runs" / "both" / "metrics.jsonl").open()]
    assert [line["step"] for line in lines if "lr" in line] == list(range(1, STEPS + 1))

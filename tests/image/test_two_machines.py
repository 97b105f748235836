"""A run of two stations on a network of their own, through what happens to machines and to the wire between them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from conftest import Station, metrics_lines, run, until

STEPS = 1000
TASK = '''"""A model that sums tell apart; its steps take as long as asked."""
import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import TensorDataset


@dataclass
class Settings:
    pause: float = 0.0


def datasets(config):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(512, 16, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin()), None


def model(config):
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1))


def loss(model, batch):
    time.sleep(batch_pause)
    inputs, wanted = batch
    return nn.functional.mse_loss(model(inputs), wanted)


batch_pause = 0.0


def optimizer(model, config):
    global batch_pause
    batch_pause = config.task.pause
    return torch.optim.Adam(model.parameters(), lr=0.001)
'''


@dataclass
class Pair:
    """Two stations, by the names of their services: the first serves the table."""

    station: Station

    def id(self, service: str) -> str:
        return self.station.compose("ps", "--all", "--quiet", service).stdout.strip()

    def train(self, service: str, *command: str, timeout: float = 240) -> str:
        inside = ("exec", "-T", "--user", "dev", "--env", "HOME=/home/dev", "--workdir", "/workspace", service, "train")
        return self.station.compose(*inside, *command, timeout=timeout).stdout

    def record(self, service: str, name: str) -> dict[str, Any]:
        return dict(json.loads(self.train(service, "show", name, "--json")))

    def goes_on(self) -> None:
        before = metrics_lines(self.station, "both")
        until("both take further steps", lambda: metrics_lines(self.station, "both") > before + 20)

    def waits_for(self, number: int) -> None:
        """The first one says for whom it waits."""
        path = self.station.folder / "runs" / "both" / "run.json"
        text = f"waiting for node {number} of 2"
        until(text, lambda: text in str(json.loads(path.read_text()).get("reason")))


@pytest.fixture
def pair(station: Station, make_station: Callable[..., Station]) -> Pair:
    made = make_station("pair", COMPOSE_PROFILES="cluster")
    made.make("up")
    for service in ("station", "second"):
        found = made.compose("ps", "--all", "--quiet", service).stdout.strip()
        until(f"{service} is healthy", lambda found=found: _health(found) == "healthy")
    task = made.folder / "projects" / "paced.py"
    task.write_text(TASK)
    task.chmod(0o644)
    return Pair(made)


def _health(container: str) -> str:
    return run("docker", "inspect", "-f", "{{.State.Health.Status}}", container).stdout.strip()


def test_machines_and_the_wire_between_them_may_fail(pair: Pair) -> None:
    fields = ("--steps", str(STEPS), "--batch_size", "32", "--schedule.decay", "constant", "--log.every_steps", "1")
    nodes = ("--name", "both", "--nproc", "1", "--nnodes", "2", "--rendezvous", "station:29400")
    for number, service in enumerate(("station", "second")):
        launch = ("launch", "projects/paced.py", *nodes, "--node-rank", str(number), *fields, "--task.pause", "0.1")
        pair.train(service, *launch)
    pair.goes_on()
    second, network = pair.id("second"), f"{pair.station.project}_default"

    run("docker", "network", "disconnect", network, second)  # nobody hears of it: no connection is closed
    pair.waits_for(1)
    run("docker", "network", "connect", "--alias", "second", network, second)
    pair.goes_on()

    run("docker", "pause", second)
    pair.waits_for(1)
    run("docker", "unpause", second)
    pair.goes_on()

    for service, number in (("second", 1), ("station", 0)):
        run("docker", "kill", pair.id(service))
        if number:
            pair.waits_for(number)
        run("docker", "start", pair.id(service))  # its keeper brings its part back
        pair.goes_on()

    until("the run is over", lambda: pair.record("station", "both")["state"] not in ("running", "interrupted"))
    records = [
        until(f"{service} knows it", lambda service=service: _finished(pair.record(service, "both")))
        for service in ("station", "second")
    ]
    pair.train("station", "run", "projects/paced.py", "--name", "one", "--spawn", "2", *fields)
    alone = pair.record("station", "one")
    assert [record["weights_sha256"] for record in records] == [alone["weights_sha256"]] * 2
    lines = [json.loads(line) for line in (pair.station.folder / "runs" / "both" / "metrics.jsonl").open()]
    steps = [line["step"] for line in lines if "loss" in line and "lr" in line]
    assert steps == list(range(1, STEPS + 1))


def _finished(record: dict[str, Any]) -> dict[str, Any] | None:
    return record if record["state"] == "finished" else None

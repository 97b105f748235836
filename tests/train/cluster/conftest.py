"""Machines of a run: each a folder of runs of its own on this one, met at a port of the loopback."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from tests.train.conftest import Station

FIELDS = (
    "--batch_size", 60, "--micro_batch_size", 5, "--checkpoint.every_steps", 50, "--log.every_steps", 1,
    "--log.samples", "true", "--log.tensorboard", "false", "--task.width", 8, "--cpu_threads", 1,
    "--optim.name", "adamw",
)  # fmt: skip
"""Of all runs here: digests of the same steps are comparable."""


class Machines:
    """Stations that stand for machines."""

    def __init__(self, folder: Path, count: int) -> None:
        self.stations = []
        for number in range(count):
            (folder / f"node{number}").mkdir()
            self.stations.append(Station(folder / f"node{number}"))
        self.rendezvous = f"127.0.0.1:{free_port()}"

    def launch(
        self, name: str, node: int, *arguments: object, nnodes: object = None, nproc: int = 1,
        env: dict[str, str] | None = None, task: object = "digits", fields: tuple[object, ...] = FIELDS,
    ) -> Any:  # fmt: skip
        """Launch a node, and return at once what it said."""
        return self.stations[node](
            "launch", task, "--name", name, "--nproc", nproc, *fields, "--nnodes", nnodes or len(self.stations),
            "--node-rank", node, "--rendezvous", self.rendezvous, *arguments, env=env,
        )  # fmt: skip

    def launch_all(self, name: str, *arguments: object, **given: Any) -> None:
        for node in range(len(self.stations)):
            done = self.launch(name, node, *arguments, **given)
            assert done.returncode == 0, done.stderr

    def kill(self, name: str, node: int) -> None:
        """Kill all processes of a node."""
        pids = self.stations[node].record(name)["pids"]
        for pid in (pids.get("agent"), *pids.get("ranks", [])):
            with contextlib.suppress(ProcessLookupError, TypeError):
                os.kill(pid, signal.SIGKILL)

    def kill_rank(self, name: str, node: int) -> None:
        os.kill(self.stations[node].record(name)["pids"]["ranks"][0], signal.SIGKILL)

    def wait(self, name: str, node: int, until: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        self.stations[node].wait(name, until, what)
        return self.stations[node].run(name).read_effective()

    def wait_for_reason(self, name: str, node: int, words: str) -> dict[str, Any]:
        return self.wait(name, node, lambda record: words in (record["reason"] or ""), f"the reason {words!r}")

    def ends(self, name: str) -> list[dict[str, Any]]:
        """The records of all nodes, once all have ended."""
        return [station.wait_for_end(name) for station in self.stations]

    def close(self) -> None:
        for station in self.stations:
            station.close()


def consumed(*stations: Station, name: str) -> dict[int, list[int]]:
    """Data set indices by step, over all ranks of all nodes."""
    steps: dict[int, list[int]] = {}
    for station in stations:
        for step, ids in station.samples(name).items():
            steps.setdefault(step, []).extend(ids)
    return {step: sorted(ids) for step, ids in sorted(steps.items())}


def lines(station: Station, name: str) -> list[Any]:
    """What metrics.jsonl says but for speeds."""
    return [(line["step"], line.get("loss"), line.get("eval")) for line in station.metrics(name)]


class OnSharedFolder(Machines):
    """Two of them, that see the same folder of runs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 2)
        self.stations[1].runs = self.stations[0].runs / ".nodes" / "1"
        self.shared = self.stations[0].runs

    def launch(self, name: str, node: int, *arguments: object, **given: Any) -> Any:
        return super().launch(name, node, *arguments, "--runs", self.shared, **given)


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[OnSharedFolder]:
    made = OnSharedFolder(tmp_path)
    yield made
    made.close()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    """Two of them."""
    made = Machines(tmp_path, 2)
    yield made
    made.close()


def name_alone(ranks: int, steps: int, *fields: object) -> str:
    return "-".join(map(str, (ranks, steps, *fields[1::2])))


@pytest.fixture(scope="session")
def alone(shared_station: Station) -> Callable[..., Station]:
    """Runs of the same fields on one machine, nobody disturbing them, by ranks, steps and fields: see `name_alone`."""
    made: set[str] = set()

    def run(ranks: int, steps: int, *fields: object) -> Station:
        name = name_alone(ranks, steps, *fields)
        if name not in made:
            shared_station.ok(
                "launch", "digits", "--name", name, "--nproc", ranks, "--steps", steps, *FIELDS, *fields, "--follow"
            )
            made.add(name)
        return shared_station

    return run


@pytest.fixture(scope="session")
def like_alone(alone: Callable[..., Station]) -> Callable[..., None]:
    """Checks that a run over machines ended as one of the same ranks and steps on one machine."""

    def check(machines: Machines, name: str, ranks: int, steps: int, *fields: object) -> None:
        single, other = alone(ranks, steps, *fields), name_alone(ranks, steps, *fields)
        for record in machines.ends(name):
            assert record["state"] == "finished", record["reason"]
            assert record["weights_sha256"] == single.record(other)["weights_sha256"]
            assert record["metrics"] == single.record(other)["metrics"]
        assert consumed(*machines.stations, name=name) == consumed(single, name=other)
        zero = machines.stations[0]
        assert lines(zero, name) == lines(single, other)
        assert max(zero.run(name).steps_saved()) == steps

    return check

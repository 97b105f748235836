"""A Slurm for the session, a folder with its commands for each test, and what a run ends like if nobody disturbs it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tasks import TASKS
from tests.train.conftest import Station
from tests.train.slurm.cluster import Login, Slurm, packages
from tests.waiting import eventually

TASK = TASKS / "sine.py"
FIELDS = (
    "--batch_size", 60, "--micro_batch_size", 5, "--checkpoint.every_steps", 100, "--log.samples", "true",
    "--log.tensorboard", "false", "--cpu_threads", 1, "--optim.name", "adamw", "--data.workers", 0, "--steps", 500,
)  # fmt: skip
"""Of all runs here: slow, they last longer than any wait; else a second or two."""


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    try:
        root = packages(tmp_path_factory.mktemp("slurm-packages"))
    except LookupError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))
    made = Slurm(root)
    try:
        made.start()
        yield made
    finally:
        made.close()


class Cluster:
    """What a user does, on the login node."""

    def __init__(self, login: Login, slurm: Slurm) -> None:
        self.login, self.slurm = login, slurm

    def submit(self, name: str, *options: object, is_slow: bool = True) -> Any:
        """Submit a run on two nodes with a rank each; return at once."""
        self.slurm.wait_idle()
        if is_slow:
            self.login.slow.touch()
        shape = ("--nodes", 2, "--nproc", 1)
        return self.login.ok("submit", TASK, "--on", "slurm", "--name", name, *shape, *FIELDS, *options)

    def hurry(self) -> None:
        """From now on no step takes its time."""
        self.login.slow.unlink()

    def wait_attempt(self, name: str, number: int, steps: int = 10) -> None:
        """Wait until the run is that often begun, and some steps on."""

        def begun(record: dict[str, Any]) -> bool:
            last = (record["attempts"] or [{"number": 0}])[-1]
            return last["number"] >= number and record["step"] >= last["from_step"] + steps

        self.login.wait(name, begun, f"attempt {number}")

    def wait_stopped(self, name: str) -> dict[str, Any]:
        self.login.wait(name, lambda record: record["state"] == "stopped", "a stop")
        return self.login.record(name)


@pytest.fixture
def cluster(tmp_path: Path, slurm: Slurm) -> Iterator[Cluster]:
    login = Login(tmp_path, slurm)
    yield Cluster(login, slurm)
    login.slow.unlink(missing_ok=True)
    for line in slurm.jobs():
        slurm("scancel", line.split()[0])
    eventually("no jobs", lambda: not slurm.jobs())
    login.close()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Station]:
    """`one`: two ranks on one machine, with nobody to disturb them."""
    station = Station(tmp_path_factory.mktemp("undisturbed"))
    station.ok("launch", TASK, "--name", "one", "--nproc", 2, *FIELDS, "--follow")
    yield station
    station.close()


@pytest.fixture
def like_undisturbed(cluster: Cluster, undisturbed: Station) -> Callable[[str], None]:
    """Checks that a run has finished on both nodes as if nobody had disturbed it, and that its job is gone."""

    def check(name: str) -> None:
        login = cluster.login
        login.wait(name, lambda record: record["state"] in ("finished", "failed"), "its end")
        login.wait_gone(name)
        one = undisturbed.record("one")
        samples: dict[int, list[int]] = {}
        for station in (login.node(0), login.node(1)):
            record = station.record(name)
            assert record["state"] == "finished", f"{record['reason']}\n{login.output(name)}"
            assert record["weights_sha256"] == one["weights_sha256"]
            for step, ids in station.samples(name).items():
                samples.setdefault(step, []).extend(ids)
        assert {step: sorted(ids) for step, ids in samples.items()} == undisturbed.samples("one")

    return check

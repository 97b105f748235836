"""A run on a Slurm whose machines are containers: nodes with names and addresses of their own, a network between them,
and a folder that they share. What a Slurm on one machine can do to a run is in tests/train/slurm."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from conftest import Station
from machines import SHARED, Cluster

from tests.tasks import TASKS

pytestmark = pytest.mark.minutes  # the same on one machine: tests/train/slurm

STEPS = 500
TASK = TASKS / "sine.py"
FIELDS = (
    "--batch_size", "60", "--micro_batch_size", "30", "--log.every_steps", "1", "--log.tensorboard", "false",
    "--checkpoint.every_steps", "10", "--cpu_threads", "1", "--optim.name", "adamw", "--data.workers", "0",
    "--steps", str(STEPS),
)  # fmt: skip
SHAPE = ("--on", "slurm", "--nodes", "2", "--nproc", "1")


@pytest.fixture(scope="module")
def cluster(station: Station) -> Iterator[Cluster]:
    made = Cluster(station.inspect("{{.Config.Image}}"), station.folder)
    try:
        made.start()
        made.user("bash", "-c", f"cat >{SHARED}/paced.py", input=TASK.read_text())
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> str:
    """The digest of two ranks on one machine, with nobody to disturb them."""
    cluster.user("train", "run", "paced.py", "--name", "one", "--spawn", "2", *FIELDS)
    return str(cluster.record("one")["weights_sha256"])


def check(cluster: Cluster, name: str, digest: str) -> None:
    """The run has ended on both nodes as if nobody had disturbed it, over the network, each step written once."""
    for node in range(2):
        record = cluster.record(name, node)
        assert record["state"] == "finished", f"{record['reason']}\n{cluster.logs()}"
        assert record["weights_sha256"] == digest
        assert record["interface"].startswith("eth")
    lines = map(json.loads, cluster.read(f"runs/{name}/metrics.jsonl").splitlines())
    assert [line["step"] for line in lines if "lr" in line] == list(range(1, STEPS + 1))


def goes_on(cluster: Cluster, name: str, on: list[str], attempt: int) -> None:
    """Wait until the run is that often begun, on these nodes, and has saved there."""

    def is_so() -> bool:
        record = cluster.record(name)
        last = (record.get("attempts") or [{"number": 0}])[-1]
        return last["number"] >= attempt and record.get("saved_step", 0) > last["from_step"]

    cluster.wait(f"attempt {attempt} of {name} on {on}", is_so)
    record = cluster.record(name)
    assert record["nodes"] == [f"node {number} ({host})" for number, host in enumerate(on)], cluster.logs()
    assert record["cluster"]["rendezvous"].startswith(f"{on[0]}:")


def test_the_machine_of_node_0_is_lost_and_the_run_goes_on_elsewhere(cluster: Cluster, undisturbed: str) -> None:
    cluster.user("touch", f"{SHARED}/slow")
    cluster.user("train", "submit", "paced.py", *SHAPE, "--name", "hard", *FIELDS)
    goes_on(cluster, "hard", ["node0", "node1"], 1)
    cluster.kill("node0")
    goes_on(cluster, "hard", ["node1", "node2"], 2)
    cluster.user("rm", f"{SHARED}/slow")
    done = cluster.user("train", "logs", "hard", "--follow", check=False)
    cluster.wait("the end of its job", lambda: cluster.state("hard") == "")
    check(cluster, "hard", undisturbed)
    assert len(cluster.record("hard")["attempts"]) == 2, done.stderr

"""A run on a Slurm whose machines are containers: nodes with names and addresses of their own, a network between them,
and a folder that they share. What a Slurm on one machine can do to a run is in tests/train/slurm."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Station
from machines import NODES, SHARED, Cluster

STEPS = 400
TASK = Path(__file__).parents[1] / "train" / "slurm" / "task.py"
FIELDS = (
    "--batch_size", "60", "--micro_batch_size", "5", "--log.every_steps", "1", "--log.tensorboard", "false",
    "--checkpoint.every_steps", "20", "--cpu_threads", "1", "--optim.name", "adamw", "--data.workers", "0",
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
    """The run has ended on both nodes as if nobody had disturbed it."""
    for number in range(2):
        record = cluster.record(name, number)
        assert record["state"] == "finished", f"{record['reason']}\n{cluster.logs()}"
        assert record["weights_sha256"] == digest
        assert {attempt["interface"] for attempt in record["attempts"]} == {"eth0"}
        assert record["cluster"]["rendezvous"].startswith("node0:")
    lines = map(json.loads, cluster.read(f"runs/{name}/metrics.jsonl").splitlines())
    assert [line["step"] for line in lines if "lr" in line] == list(range(1, STEPS + 1))


def wait_attempt(cluster: Cluster, name: str, number: int) -> None:
    """Wait until the run is that often begun, and some steps on."""

    def begun() -> bool:
        record = cluster.record(name)
        last = (record.get("attempts") or [{"number": 0}])[-1]
        return last["number"] >= number and record["step"] >= last["from_step"] + 5

    cluster.wait(f"attempt {number}", begun, 180)


def test_a_run_is_submitted_followed_and_finished(cluster: Cluster, undisturbed: str) -> None:
    done = cluster.user("train", "submit", "paced.py", *SHAPE, "--name", "quiet", *FIELDS, "--follow")
    assert f"quiet finished after {STEPS} steps" in done.stderr
    check(cluster, "quiet", undisturbed)
    record = cluster.record("quiet")
    assert len(record["attempts"]) == 1 and len(record["attempts"][0]["nodes"]) == 2
    assert [cluster.record("quiet", number)["host"] for number in range(2)] == [*NODES]


def test_controller_wire_node_and_time_fail_one_run(cluster: Cluster, undisturbed: str) -> None:
    cluster.user("touch", f"{SHARED}/slow")
    cluster.wait_idle()
    cluster.user("train", "submit", "paced.py", *SHAPE, "--name", "hard", "--warn", "20", *FIELDS)
    wait_attempt(cluster, "hard", 1)

    cluster.kill("controller")
    before = cluster.record("hard")["step"]
    cluster.wait("more steps", lambda: cluster.record("hard")["step"] > before + 5)
    cluster.boot("controller")
    cluster.wait("the controller to answer", lambda: cluster.state("hard") == "RUNNING")
    assert len(cluster.record("hard")["attempts"]) == 1

    for number, (machine, end, begin) in enumerate(
        [("node1", cluster.cut, cluster.mend), ("node0", cluster.kill, cluster.boot)], 2
    ):
        end(machine)
        cluster.wait("Slurm to notice", lambda: cluster.state("hard") != "RUNNING")
        begin(machine)
        wait_attempt(cluster, "hard", number)

    attempts = len(cluster.record("hard")["attempts"])
    job = cluster.record("hard")["submitted"]["job"]
    cluster.root("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    wait_attempt(cluster, "hard", attempts + 1)

    cluster.user("rm", f"{SHARED}/slow")
    cluster.wait("the end of its job", lambda: cluster.state("hard") == "", 180)
    check(cluster, "hard", undisturbed)

"""What runs in the pods of a run: the command of a rendered TrainJob, in the environment that Kubeflow Trainer gives,
with a volume that all see. What the cluster itself does here is done by hand: a pod that has ended is started again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.train.cluster.conftest import FIELDS, consumed, free_port
from tests.train.conftest import PATIENCE, Station
from train.cluster import manifests


class Pods:
    """The pods of one run, as processes."""

    def __init__(self, station: Station, *submit: object) -> None:
        said = station.ok("submit", *submit, "--on", "kubernetes", "--name", "a", "--nproc", 1, "--dry-run").stdout
        found = {one["kind"]: one for one in yaml.safe_load_all(said) if one}
        self.trainer = found["TrainJob"]["spec"]["trainer"]
        self.submission = station.folder / "submission"
        lies = self.submission / "..data"  # as kubelet lays a ConfigMap down: links, for which the files can be changed
        lies.mkdir(parents=True)
        for name, text in found["ConfigMap"]["data"].items():
            (lies / name).write_text(text)
            (self.submission / name).symlink_to(Path("..data") / name)
        self.volume = station.folder / "volume"
        self.stations = [Station(station.folder / f"pod{node}") for node in range(self.trainer["numNodes"])]
        for node, one in enumerate(self.stations):
            one.folder.mkdir()
            one.runs = self.volume / ".nodes" / str(node) if node else self.volume
        self.port = free_port()
        self.lives: list[subprocess.Popen[bytes]] = []

    def start(self, node: int, **environment: str) -> subprocess.Popen[bytes]:
        """A pod: node's container."""
        given = {
            "PET_NNODES": str(self.trainer["numNodes"]), "PET_NPROC_PER_NODE": str(self.trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(node), "PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": str(self.port),
            "TRAIN_RUNS": str(self.volume),
        }  # fmt: skip
        assert self.trainer["command"][:3] == ["/usr/bin/tini", "--", "python3"]
        command = [one.replace(manifests.SUBMISSION, str(self.submission), 1) for one in self.trainer["command"][3:]]
        with (self.stations[node].folder / "log").open("ab") as log:
            pod = subprocess.Popen(
                [sys.executable, *command],
                cwd=self.stations[node].folder,
                env=self.stations[node].environment() | given | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.lives.append(pod)
        return pod

    def start_all(self) -> list[subprocess.Popen[bytes]]:
        return [self.start(node) for node in range(len(self.stations))]

    def log(self, node: int) -> str:
        return (self.stations[node].folder / "log").read_text()

    def end(self, node: int, pod: subprocess.Popen[bytes]) -> int:
        """The exit code of a pod."""
        try:
            return pod.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            pytest.fail(f"pod {node} never ended:\n{self.log(node)}")

    def close(self) -> None:
        for pod in self.lives:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pod.pid, signal.SIGKILL)
            pod.wait()


@pytest.fixture
def two(station: Station) -> Iterator[Pods]:
    """Two pods of the digits, for 500 steps."""
    made = Pods(station, "digits", "--nodes", 2, "--steps", 500, *FIELDS)
    yield made
    made.close()


def finished_like(pods: Pods, single: Station, other: str) -> None:
    for node, one in enumerate(pods.stations):
        record = one.record("a")
        assert record["state"] == "finished", pods.log(node)
        assert record["weights_sha256"] == single.record(other)["weights_sha256"]
    assert consumed(*pods.stations, name="a") == consumed(single, name=other)


def test_an_evicted_pod_saves_on_all_nodes_and_new_pods_go_on(two: Pods, alone: Any) -> None:
    pods = two.start_all()
    two.stations[0].wait_for_step("a", 60)
    pods[1].send_signal(signal.SIGTERM)  # which tini hands on
    assert [two.end(node, pod) for node, pod in enumerate(pods)] == [75, 75], two.log(0) + two.log(1)
    first, second = (one.record("a") for one in two.stations)
    assert first["state"] == second["state"] == "stopped" and first["step"] == second["step"] < 500
    assert "epoch" in two.stations[0].ok("logs", "a", "--rank", 1, "--runs", two.volume).stdout  # of the other's folder
    pods = two.start_all()
    assert [two.end(node, pod) for node, pod in enumerate(pods)] == [0, 0], two.log(0) + two.log(1)
    assert two.stations[1].record("a")["attempts"][1]["from_step"] == second["step"]
    finished_like(two, alone(2, 500), "2-500")
    assert two.end(0, two.start(0)) == 0  # once more, after all: nothing is left to do


@pytest.mark.minutes
def test_a_killed_pod_comes_back_and_all_go_on(two: Pods, alone: Any) -> None:
    pods = two.start_all()
    two.stations[0].wait_for_step("a", 60)
    os.killpg(pods[0].pid, signal.SIGKILL)  # its machine is gone, and node 0 is where the others meet
    assert two.end(0, pods[0]) == -signal.SIGKILL
    pods[0] = two.start(0)
    assert [two.end(node, pod) for node, pod in enumerate(pods)] == [0, 0], two.log(0) + two.log(1)
    finished_like(two, alone(2, 500), "2-500")


def test_one_node_needs_no_rendezvous_and_a_task_of_ones_own_goes_along(station: Station) -> None:
    (station.folder / "task.py").write_bytes((Path(__file__).parent / "task.py").read_bytes())
    pods = Pods(station, "task.py", "--steps", 5, "--batch_size", 8, "--cpu_threads", 1)
    (station.folder / "task.py").unlink()
    try:
        assert pods.end(0, pods.start(0)) == 0, pods.log(0)
        assert pods.stations[0].record("a")["state"] == "finished"
    finally:
        pods.close()


def test_a_pod_waits_for_the_name_of_node_0_and_leaves_when_asked(two: Pods) -> None:
    pod = two.start(1, PET_MASTER_ADDR="a-node-0-0.invalid")
    deadline = time.monotonic() + PATIENCE
    while "does not resolve yet" not in two.log(1):
        assert time.monotonic() < deadline and pod.poll() is None, two.log(1)
        time.sleep(0.05)
    pod.send_signal(signal.SIGTERM)
    assert two.end(1, pod) == 75
    assert not (two.stations[1].runs / "a").exists()


def test_what_is_no_pod_of_a_train_job_is_refused_in_a_line(two: Pods) -> None:
    assert two.end(0, two.start(0, PET_NNODES="")) == 2
    assert two.end(1, two.start(1, PET_NNODES="3")) == 2
    assert two.log(0) == "train: PET_NNODES is ; Kubeflow Trainer sets it in the pods of a TrainJob\n"
    assert two.log(1) == "train: PET_NNODES is 3, and 2 nodes were submitted; submit it anew\n"


def test_a_training_that_fails_ends_the_job_for_good(station: Station) -> None:
    pods = Pods(station, "digits", "--steps", 500, *FIELDS, "--optim.lr", "1e30")
    try:
        assert pods.end(0, pods.start(0)) == 3, pods.log(0)
    finally:
        pods.close()

"""What runs in the pods of a run: the command of a rendered TrainJob, in the environment that Kubeflow Trainer gives,
with a volume that all see. What the cluster itself does here is done by hand: a pod that has ended is started again.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.train.cluster.conftest import FIELDS, consumed
from tests.train.cluster.pods import Pods
from tests.train.conftest import PATIENCE, Station
from train.runs import submitted


@pytest.fixture
def two(station: Station) -> Iterator[Pods]:
    """Two pods of the digits, for 500 steps."""
    made = Pods.of(station, "digits", "--nodes", 2, "--steps", 500, *FIELDS)
    yield made
    made.close()


def finished_like(pods: Pods, single: Station, other: str) -> None:
    for node, one in enumerate(pods.stations):
        record = one.record("a")
        assert record["state"] == "finished", pods.log(node)
        assert record["weights_sha256"] == single.record(other)["weights_sha256"]
    assert consumed(*pods.stations, name="a") == consumed(single, name=other)


@pytest.mark.minutes
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
def test_a_pod_leaves_when_its_place_was_given_to_another(two: Pods, alone: Any) -> None:
    """Its machine is cut off from the cluster, which does not know that it lives; the volume tells it."""
    lost = two.start(1)
    two.stations[1].wait("a", lambda record: "waiting for node 0" in record["reason"], "its waiting")
    pods = two.start_all()
    assert two.end(1, lost) == 75, two.log(1)
    assert "has a still; waiting for its end" in two.log(1)
    assert [two.end(node, pod) for node, pod in enumerate(pods)] == [0, 0], two.log(0) + two.log(1)
    finished_like(two, alone(2, 500), "2-500")


@pytest.mark.minutes
def test_a_pod_that_waits_for_the_one_before_it_ends_when_asked_and_gives_up(two: Pods) -> None:
    lost = two.start(1)
    two.stations[1].wait("a", lambda record: "waiting for node 0" in record["reason"], "its waiting")
    lost.send_signal(signal.SIGSTOP)  # it hears of nothing
    pod = two.start(1)
    deadline = time.monotonic() + PATIENCE
    while "has a still" not in two.log(1):
        assert time.monotonic() < deadline and pod.poll() is None, two.log(1)
        time.sleep(0.05)
    pod.send_signal(signal.SIGTERM)
    assert two.end(1, pod) == 75, two.log(1)
    submission = json.loads((two.submission / "submission.json").read_text())
    (two.submission / "submission.json").unlink()
    (two.submission / "submission.json").write_text(json.dumps(submission | {"wait_minutes": 0.01}))
    assert two.end(1, two.start(1)) == 1, two.log(1)
    assert "gave up after 0.01 minutes" in two.log(1) and "Traceback" not in two.log(1)
    lost.send_signal(signal.SIGCONT)
    assert two.end(1, lost) == 75, two.log(1)  # what it was asked for still holds


@pytest.mark.minutes
def test_a_killed_pod_comes_back_and_all_go_on(two: Pods, alone: Any) -> None:
    pods = two.start_all()
    two.stations[0].wait_for_step("a", 60)
    os.killpg(pods[0].pid, signal.SIGKILL)  # its machine is gone, and node 0 is where the others meet
    assert two.end(0, pods[0]) == -signal.SIGKILL
    pods[0] = two.start(0)
    assert [two.end(node, pod) for node, pod in enumerate(pods)] == [0, 0], two.log(0) + two.log(1)
    finished_like(two, alone(2, 500), "2-500")


@pytest.mark.minutes
def test_fields_of_a_resume_reach_a_node_whose_folder_is_gone(two: Pods) -> None:
    file = two.submission / "submission.json"
    content = json.loads(file.read_text())
    for steps in ("20", "40"):
        file.unlink()  # as a resume leaves it
        fields = {key: submitted.laid_over(content.get(key, {}), {"steps": steps}) for key in ("flags", "changes")}
        file.write_text(json.dumps(content | fields))
        assert [two.end(node, pod) for node, pod in enumerate(two.start_all())] == [0, 0], two.log(0) + two.log(1)
        if steps == "20":
            shutil.rmtree(two.stations[1].runs / "a")
    first, second = (one.record("a") for one in two.stations)
    assert (len(first["attempts"]), len(second["attempts"]), first["step"], second["step"]) == (2, 1, 40, 40)
    assert first["weights_sha256"] == second["weights_sha256"]


@pytest.mark.minutes
def test_one_node_needs_no_rendezvous_a_task_goes_along_and_another_run_of_that_name_is_refused(
    station: Station,
) -> None:
    """And a claim that does not answer is no wrong request, which would end the job for good."""
    claim = station.folder / "claim"
    reads = (
        "datasets(config):\n"
        "    import pathlib\n"
        "    beside = pathlib.Path(__file__).parent\n"
        "    if (beside / 'lock').exists() and not (beside / 'well').exists():  # the first rank\n"
        "        (beside / 'well').touch()\n"
        "        pathlib.Path('/proc/self/mem').read_bytes()\n"
        f"    pathlib.Path({str(claim)!r}).read_bytes()\n"
    )
    text = (Path(__file__).parent / "task.py").read_text()
    (station.folder / "task.py").write_text(text.replace("datasets(config):\n", reads, 1))
    pods = Pods.of(station, "task.py", "--steps", 5, "--batch_size", 8, "--cpu_threads", 1)
    (station.folder / "task.py").unlink()
    claim.symlink_to("/proc/self/mem")  # EIO
    try:
        assert pods.end(0, pods.start(0)) == 1
        assert "node 0: datasets() failed" in pods.log(0) and "Input/output error" in pods.log(0)
        claim.unlink()
        claim.touch()
        assert pods.end(0, pods.start(0)) == 0, pods.log(0)
        before = pods.stations[0].record("a")
        assert before["state"] == "finished" and len(before["attempts"]) == 2
        assert "rank 0: datasets() failed" in before["attempts"][0]["reason"]
        record = pods.volume / "a/run.json"
        record.rename(record.with_name("kept"))
        record.symlink_to("/proc/self/mem")
        assert pods.end(0, pods.start(0)) == 1
        assert f"cannot read {record}: Input/output error" in pods.log(0)
        record.with_name("kept").rename(record)
        Pods.of(station, "digits", "--steps", 6).close()  # another run under that name, in the same volume
        assert pods.end(0, pods.start(0)) == 2
        assert "has a run of an earlier submission; submit under another --name" in pods.log(0)
        assert pods.stations[0].record("a") == before
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


@pytest.mark.minutes
def test_a_training_that_fails_ends_the_job_for_good(station: Station) -> None:
    pods = Pods.of(station, "digits", "--steps", 500, *FIELDS, "--optim.lr", "1e30")
    try:
        assert pods.end(0, pods.start(0)) == 3, pods.log(0)
    finally:
        pods.close()

"""A run that was handed over to Kubernetes, from the machine that handed it over: it is kept in the cluster, and known
here by its name."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.train.cluster.conftest import FIELDS, consumed, wait_until
from tests.train.cluster.controllers import Controllers
from tests.train.cluster.kubectl import now
from tests.train.cluster.test_kubernetes import CLAIMS, SUBMIT, Cluster, refused
from tests.train.conftest import PATIENCE, Station
from train.cluster import manifests, trainjob
from train.record import store

RUNTIME = {"TrainingRuntime-trainstation"}


class Home(Station):
    """One's own machine, with a kubectl."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.cluster = Cluster(folder)

    def environment(self) -> dict[str, str]:
        return super().environment() | self.cluster.env

    def state(self) -> str:
        (one,) = json.loads(self.ok("ls", "--json").stdout)
        return str(one["state"])

    def shown(self) -> str:
        return self.ok("show", "first").stdout


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def pod(node: int, phase: str, **status: Any) -> dict[str, Any]:
    labels = dict([manifests.SELECTOR.split("=")]) | {manifests.RUN: "first", trainjob.INDEX: str(node)}
    name = f"first-node-0-{node}-abcde"
    metadata = {"name": name, "uid": f"uid-of-{name}", "labels": labels, "creationTimestamp": now()}
    spec = {"nodeName": f"gpu-{node}"} if phase != "Pending" else {}
    return {"kind": "Pod", "metadata": metadata, "spec": spec, "status": {"phase": phase} | status}


def holds(kind: str, reason: str = "", message: str = "") -> dict[str, Any]:
    return {"conditions": [{"type": kind, "status": "True", "reason": reason, "message": message}]}


FULL = {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPU"}]}
PULL = {"containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}]}
DIED = {"containerStatuses": [{"state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}]}
OTHER = {"status": {"conditions": [{"type": "Complete", "status": "False"}]}}
QUEUED = {"metadata": {"labels": {manifests.QUEUE: "night"}}, "spec": {"suspend": True}}


@pytest.mark.parametrize(
    ("job", "pods", "state", "words"),
    [
        ({}, [], store.QUEUED, "0 of 2 pods are there"),
        ({}, [pod(0, "Pending", **FULL), pod(1, "Pending")], store.QUEUED, "node 0 waits: Unschedulable: no GPU"),
        ({}, [pod(0, "Running"), pod(1, "Pending", **PULL)], store.RUNNING, "1 of 2 pods run; node 1 waits: ImagePull"),
        (OTHER, [pod(0, "Running"), pod(1, "Running")], store.RUNNING, "2 pods run"),
        ({"spec": {"suspend": True}}, [pod(0, "Running")], store.RUNNING, "being suspended; 1 pod is left"),
        ({"spec": {"suspend": True}}, [pod(0, "Failed", **DIED)], store.STOPPED, "its trainjob is suspended"),
        (QUEUED, [], store.QUEUED, "waits in queue night"),
        ({"metadata": {"deletionTimestamp": "x"}}, [pod(0, "Running")], store.RUNNING, "is being deleted"),
        ({"status": holds("Complete")}, [pod(0, "Succeeded")], store.FINISHED, "complete"),
        ({"status": holds("Failed", "DeadlineExceeded", "too\nlong")}, [], store.FAILED, "DeadlineExceeded: too long"),
    ],
)
def test_a_state_is_what_the_cluster_says(
    job: dict[str, Any], pods: list[dict[str, Any]], state: str, words: str
) -> None:
    made = manifests.train_job("first", "trainstation", ["true"], nodes=2)
    for key, value in job.items():
        made[key] = made.get(key, {}) | value
    found = trainjob.standings([made, *pods])["first"]
    assert (found.ended or (store.RUNNING if found.is_running else store.QUEUED)) == state
    assert words in found.words
    assert len(found.parts) == len(pods)


def test_what_became_of_pods_is_told() -> None:
    made = manifests.train_job("first", "trainstation", ["true"], nodes=2)
    parts = trainjob.standings([made, pod(1, "Failed", **DIED), pod(0, "Running")])["first"].parts
    assert parts == (
        "node 0: first-node-0-0-abcde Running on gpu-0",
        "node 1: first-node-0-1-abcde Failed on gpu-1 (exit code 137, OOMKilled)",
    )


def test_a_run_is_known_here_from_its_hand_over_to_its_removal(home: Home) -> None:
    cluster = home.cluster
    home.ok(*SUBMIT)
    assert home.state() == "queued"
    assert "no pod of node 0 that has begun" in refused(home, "logs", "first")
    assert "already" in refused(home, "resume", "first")
    assert "train stop first" in refused(home, "rm", "first")
    for node in range(2):
        cluster.put(pod(node, "Running"))
    shown = home.shown()
    assert shown.startswith("first: running: job first of kubernetes: 2 pods run")
    assert "in trainstation@test" in shown and "node 1: first-node-0-1-abcde Running on gpu-1" in shown
    (cluster.folder / "logs").mkdir()
    (cluster.folder / "logs" / "first-node-0-1-abcde").write_text("of node 1\n")
    assert home.ok("logs", "first", "--rank", 5).stdout == "of node 1\n"  # 4 ranks on each
    assert "no rank 8" in refused(home, "logs", "first", "--rank", 8)
    assert "--attempt" in refused(home, "logs", "first", "--attempt", 1)
    for node in range(2):
        cluster.path("Pod", f"first-node-0-{node}-abcde").unlink()
    cluster.change("first", status=holds("Failed", "PodFailurePolicy", "exit code 3"))
    assert home.state() == "failed" and "exit code 3" in home.shown()
    assert "stays in the claim" in home.ok("rm", "first").stderr
    assert cluster.there() == CLAIMS | RUNTIME
    assert not (home.runs / "first").exists()


@pytest.mark.minutes
def test_it_is_suspended_and_goes_on_or_is_made_anew(home: Home) -> None:
    cluster = home.cluster
    home.ok(*SUBMIT)
    done = home.ok("stop", "first")
    assert "first: stopped (train stop); its checkpoints are in the cluster; continue with: train resume" in done.stderr
    assert cluster.read("TrainJob", "first")["spec"]["suspend"] is True
    assert home.state() == "stopped" and home.record("first")["stopped_by"] == "user"
    home.ok("stop", "first")
    uid = cluster.read("TrainJob", "first")["metadata"]["uid"]
    assert home.ok("resume", "first").stdout == "first\n"
    job = cluster.read("TrainJob", "first")
    assert job["spec"]["suspend"] is False and job["metadata"]["uid"] == uid
    assert home.state() == "queued"
    home.ok("stop", "first")
    home.ok("resume", "first", "--steps", 7)  # a ConfigMap cannot be changed
    assert cluster.read("TrainJob", "first")["metadata"]["uid"] != uid
    content = json.loads(cluster.read("ConfigMap", "first")["data"]["submission.json"])
    assert content["flags"]["steps"] == content["changes"]["steps"] == "7"
    assert content["cwd"] == "/workspace"
    cluster.change("first", status=holds("Complete"))
    assert "has finished already" in home.ok("resume", "first").stderr
    assert home.ok("stop", "first").stderr == "first has finished\n"


@pytest.mark.minutes
def test_a_job_that_somebody_deletes_is_made_again(home: Home) -> None:
    cluster = home.cluster
    home.ok(*SUBMIT)
    before = cluster.read("TrainJob", "first")["spec"]
    for one in ("TrainJob", "ConfigMap", "NetworkPolicy"):
        cluster.path(one, "first").unlink()
    assert home.state() == "interrupted" and "train resume first" in home.shown()
    home.ok("resume", "first")
    assert cluster.read("TrainJob", "first")["spec"] == before and home.state() == "queued"


@pytest.mark.minutes
def test_what_kueue_starts_is_deleted_to_stop_it(home: Home) -> None:
    """It would take back a suspension."""
    home.ok(*SUBMIT, "--queue", "night")
    home.ok("stop", "first")
    assert home.cluster.there() == CLAIMS | RUNTIME and home.state() == "stopped"
    home.ok("resume", "first")
    assert home.cluster.read("TrainJob", "first")["metadata"]["labels"][manifests.QUEUE] == "night"


def test_of_a_cluster_that_does_not_answer_the_last_word_is_shown(home: Home) -> None:
    home.ok(*SUBMIT)
    home.cluster.put(pod(0, "Running"))
    assert home.state() == "running"
    before = home.record("first")
    home.cluster.down.touch()
    listed = home.ok("ls")
    (line,) = listed.stderr.splitlines()
    assert "kubernetes does not answer here" in line and "203.0.113.1" in line and "what it said last" in line
    assert " running " in listed.stdout
    assert f"first: running: as of {before['submitted']['seen']['at']}: job first of kubernetes: 1 of 2" in home.shown()
    for command in ("stop", "resume", "rm"):
        assert "kubernetes does not answer here" in refused(home, command, "first")
    assert "no cluster answers kubectl" in refused(home, "logs", "first")
    assert home.record("first") == before
    home.cluster.down.unlink()
    assert home.ok("ls").stderr == ""


@pytest.mark.minutes
def test_a_hand_over_that_fails_once_more_leaves_all_as_it_was(home: Home) -> None:
    home.ok(*SUBMIT)
    home.ok("stop", "first")
    before = home.record("first")
    (home.cluster.folder / "refuses").write_text("TrainJob")
    assert "exceeded quota" in refused(home, "resume", "first", "--steps", 7)
    after = home.record("first")
    assert (after["state"], after["stopped_by"]) == (before["state"], before["stopped_by"]) == ("stopped", "user")
    (home.cluster.folder / "refuses").unlink()
    home.ok("resume", "first")
    assert "steps" not in json.loads(home.cluster.read("ConfigMap", "first")["data"]["submission.json"])["flags"]


@pytest.fixture
def alive(home: Home) -> Iterator[Controllers]:
    """A cluster that starts pods, as processes."""
    made = Controllers(home.cluster.folder, home)
    yield made
    made.close()


@pytest.mark.minutes
def test_one_that_is_followed_ends_as_its_run_does(home: Home, alive: Controllers) -> None:
    (home.folder / "task.py").write_bytes((Path(__file__).parent / "task.py").read_bytes())
    fields = ("--on", "kubernetes", "--name", "first", "--nproc", 1, "--batch_size", 8, "--cpu_threads", 1)
    alive.full.touch()
    with (home.folder / "out").open("w") as out, (home.folder / "err").open("w") as err:
        followed = home.start("submit", "task.py", *fields, "--steps", 5, "--follow", stdout=out, stderr=err)
    wait_until(lambda: "Insufficient nvidia.com/gpu" in (home.folder / "err").read_text(), "that it waits")
    alive.full.unlink()
    assert followed.wait(PATIENCE) == 0, (home.folder / "err").read_text()
    said = (home.folder / "err").read_text().splitlines()
    assert said[1].startswith("train: first is queued: job first of kubernetes: ") and said[-1] == "first finished"
    assert home.state() == "finished"
    assert (home.folder / "out").read_text() == "first\n" + home.ok("logs", "first").stdout
    assert Station(home.folder).run("first").folder != (home.folder / "volume" / "first")
    assert json.loads((home.folder / "volume" / "first" / "run.json").read_text())["state"] == "finished"


@pytest.mark.minutes
def test_a_failed_training_is_told_with_its_code(home: Home, alive: Controllers) -> None:
    fields = ("--on", "kubernetes", "--name", "first", "--nproc", 1, *FIELDS, "--optim.lr", "1e30")
    done = home("submit", "digits", *fields, "--steps", 500, "--follow")
    assert done.returncode == 3, done.stderr
    assert "first failed: job first of kubernetes: PodFailurePolicy" in done.stderr.splitlines()[-1]


@pytest.mark.minutes
def test_a_stop_at_once_gives_pods_a_second(home: Home, alive: Controllers) -> None:
    inside = Station(home.folder)
    inside.runs = home.folder / "volume"
    home.ok("submit", "digits", "--on", "kubernetes", "--name", "first", "--nproc", 1, *FIELDS, "--steps", 5000)
    inside.wait_for_step("first", 20)
    home.ok("stop", "first", "--now")
    assert home.state() == "stopped" and not any(name.startswith("Pod-") for name in home.cluster.there())
    calls = (home.cluster.folder / "calls").read_text()
    assert '"delete", "pod"' in calls and "--grace-period=1" in calls


@pytest.mark.minutes
def test_two_nodes_save_when_stopped_and_go_on_to_the_same_end(home: Home, alive: Controllers, alone: Any) -> None:
    volume = home.folder / "volume"
    nodes = [Station(home.folder) for _ in range(2)]
    for node, one in enumerate(nodes):
        one.runs = volume / ".nodes" / str(node) if node else volume
    shape = ("--on", "kubernetes", "--name", "first", "--nodes", 2, "--nproc", 1)
    followed = home.start("submit", "digits", *shape, "--steps", 500, *FIELDS, "--follow")
    nodes[0].wait_for_step("first", 60)
    assert home.state() == "running"
    followed.send_signal(signal.SIGINT)
    said, _ = followed.communicate(timeout=PATIENCE)
    assert followed.returncode == 130 and "first goes on" in said
    home.ok("stop", "first")
    first, second = (one.record("first") for one in nodes)
    assert first["state"] == second["state"] == home.state() == "stopped"
    assert first["step"] == second["step"] < 500
    assert max(nodes[0].run("first").steps_saved()) == first["step"]
    done = home("resume", "first", "--follow")
    assert done.returncode == 0, done.stderr
    for one in nodes:
        assert one.record("first")["weights_sha256"] == alone(2, 500).record("2-500")["weights_sha256"]
    assert consumed(*nodes, name="first") == consumed(alone(2, 500), name="2-500")
    assert home.state() == "finished"
    home.ok("rm", "first")
    wait_until(lambda: home.cluster.there() == CLAIMS | RUNTIME, "that all of it is gone")

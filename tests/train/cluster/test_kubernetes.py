"""Runs on Kubernetes: what a cluster is given, what is made of its answers, and what its pods do. No cluster is here.

kubectl is a script that notes what it is given and gives the answers that lie in a folder; pods are processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ports import free_port
from tests.train.cluster.conftest import FIELDS, consumed
from tests.train.cluster.published import faults
from tests.train.commands.test_bad_input import refused
from tests.train.conftest import PATIENCE, Station, command
from tests.waiting import eventually
from train.run.run_folder import Run

DEPLOY = Path(__file__).parents[3] / "deploy" / "kubernetes"
SUBMIT = ("submit", "digits", "--on", "kubernetes", "--name", "a", "--nodes", 2, "--nproc", 1)
ALL = (
    "--on", "kubernetes", "--name", "all", "--nodes", 64, "--gpus-per-node", 8, "--time", "2-12:00:00", "--warn", 300,
    "--cpus-per-task", 96, "--mem", "1.5T", "--shm", "256Gi", "--container", "registry.example/trainstation:1",
    "--namespace", "research", "--runs-claim", "fast", "--data-claim", "big", "--queue", "night",
    "--env", "NCCL_DEBUG=INFO,NCCL_IB_HCA==mlx5_0", "--env-from", "WANDB_API_KEY=tools,HF_TOKEN=hub/token", "--dry-run",
)  # fmt: skip
KUBECTL = """#!/bin/bash
echo "$*" >>"$CLUSTER/calls"
case " $* " in
*" current-context "*) echo test ;;
*" --dry-run=server "* | *" create "*)
    if [ -e "$CLUSTER/problem" ]; then cat "$CLUSTER/problem" >&2; exit 1; fi
    if [[ " $* " == *" --dry-run=server "* ]]; then cat >/dev/null; else cat >>"$CLUSTER/created"; fi
    printf '\\n---\\n' >>"$CLUSTER/created" ;;
*" get "*) cat "$CLUSTER/answer" ;;
*" delete "*) echo '{"items": []}' >"$CLUSTER/answer" ;;
*" logs "*)
    echo "what the pod has said"
    if [ -e "$CLUSTER/next" ]; then mv "$CLUSTER/next" "$CLUSTER/answer"; fi ;;
esac
"""


def read(text: str) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(text) if one is not None]


class Cluster:
    """What kubectl was given, and what it answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "cluster"
        (folder / "bin").mkdir(parents=True)
        self.folder.mkdir()
        (folder / "bin" / "kubectl").write_text(KUBECTL)
        (folder / "bin" / "kubectl").chmod(0o755)
        self.env = {"CLUSTER": str(self.folder), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
        self.answer([])

    def answer(self, items: list[dict[str, Any]]) -> None:
        (self.folder / "answer").write_text(json.dumps({"items": items}))

    def created(self) -> list[dict[str, Any]]:
        """All that was created."""
        return read((self.folder / "created").read_text())

    def calls(self) -> str:
        return (self.folder / "calls").read_text()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster(tmp_path)
    for name, value in made.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRAIN_RUNS", raising=False)
    return made


def ok(*arguments: object) -> tuple[str, str]:
    """What a command of a user's says, on stdout and stderr."""
    code, out, err = command(*arguments)
    assert code == 0, err
    return out, err


def test_everything_that_is_kept_for_kubernetes_is_what_is_published() -> None:
    found = [one for path in sorted(DEPLOY.glob("*.yaml")) for one in read(path.read_text()) if "metadata" in one]
    assert len(found) == 5
    for manifest in found:
        assert faults(manifest) == [], manifest["metadata"]["name"]
        spoilt = manifest | {"spec": manifest.get("spec", {}) | {"no such field": 1}}
        assert faults(spoilt) != []
    (runtime,) = (one for one in found if one["kind"] == "TrainingRuntime")
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["automountServiceAccountToken"] is False
    rights = pod["containers"][0]["securityContext"]
    assert rights["capabilities"] == {"drop": ["ALL"]} and rights["allowPrivilegeEscalation"] is False


def test_a_train_job_with_all_options_is_what_is_published(cluster: Cluster) -> None:
    (manifest,) = read(ok("submit", "digits", "--batch_size", 512, *ALL)[0])
    assert faults(manifest) == []
    assert manifest["metadata"]["namespace"] == "research" and not Path("runs").exists()
    job = manifest["spec"]
    assert job["activeDeadlineSeconds"] == 60 * 3600
    assert job["trainer"]["image"] == "registry.example/trainstation:1"
    assert job["trainer"]["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": "8", "cpu": "96", "memory": "1.5Ti"}
    assert job["trainer"]["env"][1] == {"name": "NCCL_IB_HCA", "value": "=mlx5_0"}
    assert job["trainer"]["env"][2:] == [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
        for name, secret, key in (("WANDB_API_KEY", "tools", "WANDB_API_KEY"), ("HF_TOKEN", "hub", "token"))
    ]
    (patched,) = job["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = patched["template"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 360
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "256Gi"}
    assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == "fast"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--name", "My_Run-0.1"), "up to 45 of a-z, 0-9 and -, a letter first: --name my-run-0-1"),
        (("--mem", "64"), "--mem 64: give a size such as 64G"),
        (("--env", "NCCL_DEBUG"), "give NAME=VALUE"),
        (("--env", "PET_NNODES=3"), "Kubeflow Trainer or the pod itself sets it"),
        (("--env", "WANDB_API_KEY=9e3779b97f4a7c15"), "--env WANDB_API_KEY: looks like a secret"),
        (("--env-from", "WANDB_API_KEY=My Secret"), "give the name of a Secret"),
        (("--namespace", "My_Space"), "--namespace My_Space"),
        (("--init", "/datasets/../etc/passwd"), "pods cannot read this machine's files"),
        (("--kube-context", "a\nb: c"), "--kube-context 'a\\nb: c': give a name"),
        (("--container", "a\nb"), "--container 'a\\nb': give an image"),
        (("--partition", "gpu"), "--on slurm"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_cluster_is_asked(
    cluster: Cluster, arguments: tuple[object, ...], words: str
) -> None:
    assert "9e3779b97f4a7c15" not in refused(command(*SUBMIT, *arguments), words)
    assert not (cluster.folder / "calls").exists() and not Path("runs").exists()


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        ('error: resource mapping not found: no matches for kind "TrainJob"', "no Kubeflow Trainer v2"),
        ('Error from server (NotFound): namespaces "trainstation" not found', "kubectl apply -k deploy/kubernetes"),
        ('Error from server (AlreadyExists): trainjobs "a" already exists', "give another --name"),
        ("The connection to the server localhost:8080 was refused", "--kube-context NAME"),
    ],
)
def test_what_a_cluster_refuses_leaves_nothing_behind(cluster: Cluster, problem: str, words: str) -> None:
    (cluster.folder / "problem").write_text(problem + "\n")
    refused(command(*SUBMIT), words)
    assert not (cluster.folder / "created").exists() and not Path("runs").exists()


def test_a_run_is_handed_over_looked_at_stopped_resumed_and_removed(
    cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Run(Path("runs/a"))
    assert ok(*SUBMIT, "--steps", 500)[0] == "a\n"
    made = cluster.created()
    assert [one["kind"] for one in made] == ["ConfigMap", "NetworkPolicy", "TrainJob"]
    for manifest in made:
        assert faults(manifest) == []
    (label,) = {one["metadata"]["labels"]["trainstation/submission"] for one in made}
    assert label == run.read()["submission"]
    job = made[2]
    waits = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no node has 4 GPUs"}
    pods = [
        {
            "kind": "Pod",
            "metadata": {"name": f"a-node-0-{node}", "labels": {"jobset.sigs.k8s.io/jobset-name": "a"}},
            "status": status,
        }
        for node, status in enumerate(({"phase": "Running"}, {"phase": "Pending", "conditions": [waits]}))
    ]
    cluster.answer([job, pods[1]])
    assert "queued: kubernetes: 0 of 2 pods run; a-node-0-1 waits: Unschedulable: no node has 4 GPUs" in ok(
        "show", "a"
    )[0].replace("\n", " ")
    refused(command("resume", "a"), "already")
    refused(command("rm", "a"), "train stop a")
    cluster.answer([job, *pods])
    assert " running " in ok("ls")[0] and " running " in ok("top")[0]
    assert ok("logs", "a", "--rank", 1)[0] == "what the pod has said\n"
    assert "logs --selector=jobset.sigs.k8s.io/jobset-name=a,batch.kubernetes.io/job-completion-index=1" in (
        cluster.calls()
    )
    assert command("wait", "a", "--timeout", 0)[0] == 124
    assert "train resume a" in ok("stop", "a")[1]
    assert f"--context test --request-timeout=20s delete trainjob --selector=trainstation/submission={label}" in (
        cluster.calls()
    )
    assert run.read()["state"] == "stopped"
    ok("resume", "a", "--steps", 600)
    again = json.loads(cluster.created()[3]["data"]["submission.json"])
    assert (again["flags"]["steps"], again["changes"]) == ("500", {"steps": "600"})
    cluster.answer([job, *pods])
    complete = job | {"status": {"conditions": [{"type": "Complete", "status": "True"}]}}
    (cluster.folder / "next").write_text(json.dumps({"items": [complete]}))
    _, said = ok("logs", "a", "--follow")
    assert capfd.readouterr().out == "what the pod has said\n"
    assert "train: a is running: kubernetes: 1 of 2 pods run; a-node-0-1 waits" in said
    assert "finished already" in ok("resume", "a")[1]
    ended = {"type": "Failed", "status": "True", "reason": "PodFailurePolicy", "message": "exit code 3"}
    cluster.answer([job | {"status": {"conditions": [ended]}}])
    code, _, said = command("logs", "a", "--follow")
    assert code == 3 and "a failed: kubernetes: PodFailurePolicy: exit code 3" in said
    code, line, _ = command("wait", "a")
    assert (code, line) == (3, "a failed: kubernetes: PodFailurePolicy: exit code 3\n")
    (cluster.folder / "answer").write_text("<html>")
    refused(command("wait", "a"), "kubernetes does not answer here")
    assert "kubernetes does not answer here" in ok("ls")[1]
    refused(command("stop", "a"), "kubernetes does not answer here")
    cluster.answer([])
    assert "its checkpoints stay in the claim for runs of trainstation@test" in ok("rm", "a")[1]
    assert "delete trainjob,configmap,networkpolicy" in cluster.calls() and not run.folder.exists()


class Pods:
    """The pods of a TrainJob, as processes: its command, in the environment that Kubeflow Trainer gives."""

    def __init__(self, station: Station, cluster: Cluster, *submit: object) -> None:
        ok(*submit)
        files, _, job = cluster.created()
        self.trainer = job["spec"]["trainer"]
        self.submission = station.folder / "submission"
        self.submission.mkdir()
        for name, text in files["data"].items():
            (self.submission / name).write_text(text)
        self.volume = station.folder / "volume"
        self.stations = [Station(station.folder / f"pod{node}") for node in range(self.trainer["numNodes"])]
        for node, one in enumerate(self.stations):
            one.folder.mkdir()
            one.runs = self.volume / ".nodes" / str(node) if node else self.volume
        self.port = free_port()
        self.lives: list[subprocess.Popen[bytes]] = []

    def start(self, node: int, **more: str) -> subprocess.Popen[bytes]:
        given = {
            "PET_NNODES": str(self.trainer["numNodes"]), "PET_NODE_RANK": str(node), "PET_MASTER_ADDR": "localhost",
            "PET_MASTER_PORT": str(self.port), "TRAIN_RUNS": str(self.volume), "PYTHONHASHSEED": "0",
        }  # fmt: skip
        assert self.trainer["command"][:3] == ["/usr/bin/tini", "--", "python3"]
        command = [one.replace("/submission", str(self.submission), 1) for one in self.trainer["command"][3:]]
        with (self.stations[node].folder / "log").open("ab") as log:
            pod = subprocess.Popen(
                [sys.executable, *command],
                cwd=self.stations[node].folder,
                env=self.stations[node].environment() | given | more,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.lives.append(pod)
        return pod

    def ends(self, *pods: subprocess.Popen[bytes]) -> list[int]:
        """Their exit codes."""
        try:
            return [pod.wait(PATIENCE) for pod in pods]
        except subprocess.TimeoutExpired:
            pytest.fail(f"a pod never ended:\n{self.logs()}")

    def logs(self) -> str:
        return "\n".join((one.folder / "log").read_text() for one in self.stations if (one.folder / "log").exists())

    def close(self) -> None:
        for pod in self.lives:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pod.pid, signal.SIGKILL)
            pod.wait()


@pytest.fixture
def two(station: Station, cluster: Cluster) -> Iterator[Pods]:
    """Two pods of the digits, for 500 steps."""
    made = Pods(station, cluster, *SUBMIT, "--steps", 500, *FIELDS)
    yield made
    made.close()


@pytest.mark.minutes
def test_pods_are_evicted_and_killed_and_replaced_while_they_live(two: Pods, alone: Any) -> None:
    pods = [two.start(0), two.start(1)]
    two.stations[0].wait_for_step("a", 60)
    pods[1].send_signal(signal.SIGTERM)  # which tini hands on
    assert two.ends(*pods) == [75, 75], two.logs()
    first, second = (one.record("a") for one in two.stations)
    assert first["state"] == second["state"] == "stopped" and first["step"] == second["step"] < 500
    pods = [two.start(0), two.start(1)]
    two.stations[0].wait_for_step("a", first["step"] + 60)
    assert two.stations[1].record("a")["attempts"][1]["from_step"] == second["step"]
    os.killpg(pods[0].pid, signal.SIGKILL)  # its machine is gone, and node 0 is where the others meet
    assert two.ends(pods[0]) == [-signal.SIGKILL]
    lost = pods[1]  # its machine is cut off from the cluster, which does not know that it lives; the volume tells it
    pods = [two.start(0), two.start(1)]
    assert two.ends(lost, *pods) == [75, 0, 0], two.logs()
    single = alone(2, 500)
    for one in two.stations:
        assert one.record("a")["state"] == "finished", two.logs()
        assert one.record("a")["weights_sha256"] == single.record("2-500")["weights_sha256"]
    assert consumed(*two.stations, name="a") == consumed(single, name="2-500")
    assert two.ends(two.start(0)) == [0]  # once more, after all: nothing is left to do
    content = json.loads((two.submission / "submission.json").read_text())
    (two.submission / "submission.json").write_text(json.dumps(content | {"id": "another"}))
    assert two.ends(two.start(0)) == [2] and "another submission's run" in two.logs()


def test_what_is_no_pod_of_this_train_job_is_refused_in_a_line(two: Pods) -> None:
    assert two.ends(two.start(0, PET_NNODES=""), two.start(1, PET_NNODES="3")) == [2, 2]
    assert "train: PET_NNODES is empty; Kubeflow Trainer, or the batch script, sets it\n" in two.logs()
    assert "train: PET_NNODES is 3, but 2 nodes were submitted; submit the run again\n" in two.logs()
    pod = two.start(1, PET_MASTER_ADDR="a-node-0-0.invalid")
    eventually("that it waits for the name", lambda: "does not resolve yet" in two.logs())
    pod.send_signal(signal.SIGTERM)
    assert two.ends(pod) == [75] and not (two.stations[1].runs / "a").exists()

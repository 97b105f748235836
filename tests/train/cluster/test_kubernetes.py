"""`train submit --on kubernetes`: what a cluster is given, and a line for whatever is wrong or missing."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.train.cluster import kubectl
from tests.train.conftest import Station
from train.cluster import manifests

ROOT = Path(__file__).parents[3]
SUBMIT = ("submit", "digits", "--on", "kubernetes", "--name", "first", "--nodes", 2, "--gpus-per-node", 4)


class Cluster:
    """A cluster that is a folder, and the kubectl that leads there (kubectl.py)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "cluster"
        (self.folder / "trainstation").mkdir(parents=True)
        bin_ = folder / "bin"
        bin_.mkdir()
        tool = bin_ / "kubectl"
        tool.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.train.cluster.kubectl "$@"\n')
        tool.chmod(0o755)
        self.env = {"CLUSTER": str(self.folder), "PATH": f"{bin_}{os.pathsep}{os.environ['PATH']}"}
        self.down = self.folder / "down"
        for name in (manifests.RUNS_CLAIM, manifests.DATA_CLAIM):
            self.put(manifests.claim(name, "ReadWriteMany", "1Gi"))

    def put(self, manifest: dict[str, Any]) -> None:
        self.path(manifest["kind"], manifest["metadata"]["name"]).write_text(json.dumps(manifest))

    def path(self, kind: str, name: str) -> Path:
        return self.folder / "trainstation" / f"{kind}-{name}.json"

    def read(self, kind: str, name: str) -> dict[str, Any]:
        return json.loads(self.path(kind, name).read_text())

    def change(self, name: str, **more: Any) -> None:
        """What somebody else does to a TrainJob."""
        self.put(merged(self.read("TrainJob", name), more))

    def there(self) -> set[str]:
        return {path.stem for path in (self.folder / "trainstation").iterdir()}


def merged(one: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    kubectl.merge(one, more)
    return one


CLAIMS = {"PersistentVolumeClaim-trainstation-runs", "PersistentVolumeClaim-trainstation-data"}
RUN = {"TrainJob-first", "ConfigMap-first", "NetworkPolicy-first"}


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def refused(station: Station, *arguments: object, env: dict[str, str] | None = None) -> str:
    done = station(*arguments, env=env)
    assert done.returncode == 2 and done.stdout == "", (done.stdout, done.stderr)
    (line,) = done.stderr.splitlines()
    assert arguments[0] != "submit" or not station.runs.exists()
    return line


def test_a_run_is_created_with_all_that_belongs_to_it(station: Station, cluster: Cluster) -> None:
    done = station.ok(*SUBMIT, env=cluster.env)
    assert done.stdout == "first\n"
    assert "trainjob first in trainstation@test" in done.stderr and "runs/first/job.yaml" in done.stderr
    assert cluster.there() == CLAIMS | RUN | {"TrainingRuntime-trainstation"}
    for kind in ("ConfigMap", "NetworkPolicy"):  # they go when the TrainJob is deleted
        (owner,) = cluster.read(kind, "first")["metadata"]["ownerReferences"]
        assert owner["uid"] == cluster.read("TrainJob", "first")["metadata"]["uid"] and owner["kind"] == "TrainJob"
    id_ = station.record("first")["submission"]  # of each submission its own
    shown = station.ok(*SUBMIT, "--runs", "other", "--dry-run").stdout
    handed = (station.runs / "first" / "job.yaml").read_text()
    assert handed == re.sub(r'"id": "[0-9a-f]{16}"', f'"id": "{id_}"', shown)
    station.runs.rename(station.folder / "moved")
    again = refused(station, *SUBMIT, env=cluster.env)
    assert "has a trainjob first already" in again and "delete trainjob first" in again


def test_a_runtime_that_is_there_is_left_as_it_is(station: Station, cluster: Cluster) -> None:
    cluster.put(manifests.runtime() | {"mine": True})
    station.ok(*SUBMIT, env=cluster.env)
    assert json.loads(cluster.path("TrainingRuntime", "trainstation").read_text())["mine"] is True


@pytest.mark.parametrize("kind", ["TrainJob", "ConfigMap", "NetworkPolicy"])
def test_what_a_cluster_refuses_half_way_leaves_nothing_behind(station: Station, cluster: Cluster, kind: str) -> None:
    (cluster.folder / "refuses").write_text(kind)
    assert "exceeded quota" in refused(station, *SUBMIT, env=cluster.env)
    assert cluster.there() == CLAIMS


def test_a_missing_claim_is_named_and_one_that_cannot_be_shared(station: Station, cluster: Cluster) -> None:
    cluster.put(manifests.claim(manifests.RUNS_CLAIM, "ReadWriteOnce", "1Gi"))
    assert "is ReadWriteOnce: pods on 2 machines need ReadWriteMany" in refused(station, *SUBMIT, env=cluster.env)
    line = refused(station, *SUBMIT, "--data-claim", "other", env=cluster.env)
    assert "ReadWriteMany" in line
    cluster.put(manifests.claim(manifests.RUNS_CLAIM, "ReadWriteMany", "1Gi"))
    line = refused(station, *SUBMIT, "--data-claim", "other", env=cluster.env)
    assert "no volume claim other for data" in line and "kubectl apply -k deploy/kubernetes" in line
    assert cluster.there() == CLAIMS


def test_without_kubectl_a_line_says_so(station: Station, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "kubectl is not installed" in refused(station, *SUBMIT, env={"PATH": str(empty)})


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_without_a_cluster_a_line_says_so(station: Station, tmp_path: Path) -> None:
    env = {"KUBECONFIG": str(tmp_path / "none"), "HOME": str(tmp_path), "KUBERNETES_SERVICE_HOST": ""}
    line = refused(station, *SUBMIT, env=env)
    assert "no cluster answers kubectl" in line and "--kube-context" in line


def test_a_cluster_without_trainer_is_named(station: Station, cluster: Cluster) -> None:
    tool = Path(cluster.env["PATH"].split(os.pathsep)[0]) / "kubectl"
    tool.write_text('#!/bin/sh\necho "error: the server doesn\'t have a resource type \\"trainjob\\"" >&2; exit 1\n')
    assert "no Kubeflow Trainer v2" in refused(station, *SUBMIT, env=cluster.env)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--name", "My_Run"), "such as my-run"),
        (("--name", "9lives"), "such as run-9lives"),
        (("--name", "a" * 52), "too long by 4"),
        (("--mem", "64"), "--mem 64: give a size such as 64G"),
        (("--mem", "0G"), "--mem 0G"),
        (("--shm", "lots"), "--shm lots"),
        (("--env", "NCCL_DEBUG"), "give NAME=VALUE"),
        (("--env", ""), "give NAME=VALUE"),
        (("--env", "PET_NNODES=3"), "Kubeflow Trainer or the pod itself sets it"),
        (("--env-from", "PET_NNODES=many"), "Kubeflow Trainer or the pod itself sets it"),
        (("--env-from", "WANDB_API_KEY"), "--env-from WANDB_API_KEY: give NAME=VALUE"),
        (("--env-from", "WANDB_API_KEY=My Secret"), "give the name of a Secret"),
        (("--env-from", "WANDB_API_KEY=tools/"), "give the name of a Secret"),
        (("--env", "A=1", "--env-from", "A=tools"), "both give A"),
        (("--namespace", "My_Space"), "--namespace My_Space"),
        (("--queue", "-"), "--queue -"),
        (("--init", "weights.safetensors"), "pods cannot read this machine's files"),
        (("--init", "/datasets/../etc/passwd"), "pods cannot read this machine's files"),
        (("--kube-context", "a\nb: c"), "--kube-context 'a\\nb: c': give a name"),
        (("--kube-context", ""), "--kube-context '': give a name"),
        (("--container", ""), "--container '': give an image"),
        (("--container", "a\nb"), "--container 'a\\nb': give an image"),
        (("--shm", ""), "--shm : give a size"),
        (("--mem", "9" * 40 + "G"), "give a size such as 64G"),
        (("--namespace", "n" * 64), "no name that Kubernetes takes"),
        (("--warn", 100000), "--warn 100000: at most 86400"),
        (("--partition", "gpu"), "--on slurm"),
        (("--time", "soon"), "--time soon"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_cluster_is_asked(
    station: Station, arguments: tuple[object, ...], words: str
) -> None:
    assert words in refused(station, *SUBMIT, *arguments, "--dry-run")


@pytest.mark.parametrize(
    "pair",
    ["WANDB_API_KEY=9e3779b97f4a7c15", "HF=hf_9e3779b97f4a7c15f39c", "HTTPS_PROXY=http://me:9e3779b97f4a7c15@proxy:1"],
)
def test_a_secret_is_not_written_where_others_read_it(station: Station, pair: str) -> None:
    name = pair.partition("=")[0]
    line = refused(station, *SUBMIT, "--env", f"NCCL_IB_PKEY=2,{pair}", "--dry-run")
    assert f"--env {name}: reads like a secret" in line and f"--env-from {name}=NAME" in line
    slurm = ("submit", "digits", "--on", "slurm", "--name", "first", "--nproc", 1, "--dry-run")
    line += refused(station, *slurm, "--sbatch", f"export=ALL,{pair}")
    assert f"export={name} reads like a secret" in line
    assert "9e3779b97f4a7c15" not in line
    assert not station.runs.exists()


def test_weights_to_begin_with_lie_where_pods_see_them(station: Station) -> None:
    there = "/workspace/runs/first.safetensors"
    shown = station.ok(*SUBMIT, "--init", there, "--dry-run").stdout
    assert f'"init": "{there}"' in shown and not station.runs.exists()


def test_a_task_that_is_too_large_for_a_config_map_is_refused(station: Station) -> None:
    task = (Path(__file__).parent / "task.py").read_text()
    (station.folder / "task.py").write_text(task + f"\nTABLE = {'x' * (1 << 20)!r}\n")
    line = refused(station, "submit", "task.py", "--on", "kubernetes", "--name", "first", "--nproc", 1, "--dry-run")
    assert "a ConfigMap takes 1048576" in line

"""What is handed to Kubernetes is what Kubernetes and Kubeflow Trainer publish that they take, field by field."""

from __future__ import annotations

import base64
import copy
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.train.cluster.published import faults
from tests.train.conftest import Station
from train.cluster import manifests
from train.cluster.submission import to_json

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy" / "kubernetes"
EXAMPLE = (
    "submit", "digits", "--on", "kubernetes", "--name", "digits", "--nodes", 2, "--nproc", 1, "--cpus-per-task", 2,
    "--mem", "4G", "--shm", "1G", "--dry-run",
)  # fmt: skip
ALL = (
    "--on", "kubernetes", "--name", "all", "--nodes", 64, "--gpus-per-node", 8, "--time", "2-12:00:00", "--warn", 300,
    "--cpus-per-task", 96, "--mem", "1.5T", "--shm", "256Gi", "--container", "registry.example/trainstation:1",
    "--namespace", "research", "--runs-claim", "fast", "--data-claim", "big", "--queue", "night",
    "--env", "NCCL_DEBUG=INFO,NCCL_IB_HCA==mlx5_0", "--env-from", "WANDB_API_KEY=tools,HF_TOKEN=hub/token", "--dry-run",
)  # fmt: skip


def read(text: str) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(text) if one is not None]


def of_kind(found: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (one,) = (manifest for manifest in found if manifest["kind"] == kind)
    return one


def in_files() -> list[dict[str, Any]]:
    return [one for path in sorted(DEPLOY.rglob("*.yaml")) for one in read(path.read_text()) if "metadata" in one]


def test_everything_that_is_kept_for_kubernetes_is_what_is_published() -> None:
    assert len(in_files()) == 8
    for manifest in in_files():
        assert faults(manifest) == [], manifest["metadata"]["name"]


def test_everything_that_a_submission_renders_is_what_is_published(station: Station) -> None:
    (station.folder / "task.py").write_bytes((Path(__file__).parent / "task.py").read_bytes())
    (station.folder / "more.toml").write_text("seed = 7\n")
    said = station.ok("submit", "task.py", "--config", "more.toml", "--optim.lr", 0.1, "--batch_size", 512, *ALL).stdout
    found = read(said)
    assert [one["kind"] for one in found] == ["TrainingRuntime", "ConfigMap", "NetworkPolicy", "TrainJob"]
    for manifest in found:
        assert faults(manifest) == []
        assert manifest["metadata"]["namespace"] == "research"
    job, files = of_kind(found, "TrainJob")["spec"], of_kind(found, "ConfigMap")["data"]
    assert files["task.py"] == (station.folder / "task.py").read_text()
    assert files["submitted.toml"] == "seed = 7\n"
    content = json.loads(files["submission.json"])
    assert (
        content["flags"] == {"optim.lr": "0.1", "batch_size": "512"}
        and content["nodes"] == 64
        and content["nproc"] == 8
    )
    assert str(station.folder) not in content["cwd"]
    assert job["trainer"]["image"] == "registry.example/trainstation:1"
    assert job["trainer"]["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": "8", "cpu": "96", "memory": "1.5Ti"}
    assert job["trainer"]["env"][1] == {"name": "NCCL_IB_HCA", "value": "=mlx5_0"}
    assert job["trainer"]["env"][2:] == [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
        for name, secret, key in (("WANDB_API_KEY", "tools", "WANDB_API_KEY"), ("HF_TOKEN", "hub", "token"))
    ]
    assert job["activeDeadlineSeconds"] == 60 * 3600
    (patched,) = job["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = patched["template"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 360
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "256Gi"}
    assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == "fast"
    assert volumes["data"]["persistentVolumeClaim"]["claimName"] == "big"
    assert not station.runs.exists()


def _wrong_field(job: dict[str, Any], runtime: dict[str, Any]) -> None:
    job["spec"]["trainer"]["numProcesses"] = 4


def _wrong_type(job: dict[str, Any], runtime: dict[str, Any]) -> None:
    job["spec"]["trainer"]["numNodes"] = "2"


def _null(job: dict[str, Any], runtime: dict[str, Any]) -> None:
    job["spec"]["suspend"] = None


def _of_an_older_trainer(job: dict[str, Any], runtime: dict[str, Any]) -> None:
    job["spec"]["podTemplateOverrides"] = job["spec"].pop("runtimePatches")


def _no_reference(job: dict[str, Any], runtime: dict[str, Any]) -> None:
    policy = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]
    del policy["rules"][0]["action"]


def _deep_in_the_pod(job: dict[str, Any], runtime: dict[str, Any]) -> None:
    _pod_of(runtime)["securityContext"]["runAsNonroot"] = True


def _a_word_for_a_number(job: dict[str, Any], runtime: dict[str, Any]) -> None:
    _pod_of(runtime)["terminationGracePeriodSeconds"] = "180s"


def _pod_of(runtime: dict[str, Any]) -> dict[str, Any]:
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    return job["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    "spoil",
    [_wrong_field, _wrong_type, _null, _of_an_older_trainer, _no_reference, _deep_in_the_pod, _a_word_for_a_number],
)
def test_a_wrong_field_a_wrong_type_and_a_missing_one_are_refused(spoil: Callable[..., None]) -> None:
    job = manifests.train_job("a", "b", ["true"], nodes=2, resources={"cpu": "1"}, seconds=60)
    runtime = manifests.runtime()
    assert faults(job) == faults(runtime) == []
    job, runtime = copy.deepcopy((job, runtime))
    spoil(job, runtime)
    assert len(faults(job) + faults(runtime)) >= 1


def test_what_is_applied_by_hand_and_what_is_submitted_are_the_same(station: Station) -> None:
    base = {(one["kind"], one["metadata"]["name"]): one for one in in_files() if one["metadata"]["name"] != "digits"}
    mine = [
        manifests.namespace(),
        manifests.claim(manifests.RUNS_CLAIM, "ReadWriteMany", "500Gi"),
        manifests.claim(manifests.DATA_CLAIM, "ReadWriteMany", "500Gi"),
        manifests.closed(),
        manifests.runtime(),
    ]
    assert {(one["kind"], one["metadata"]["name"]): one for one in mine} == base
    rendered = read(station.ok(*EXAMPLE).stdout)
    assert rendered[0] == manifests.runtime()
    submission = json.loads(rendered[1]["data"]["submission.json"])
    assert len(submission.pop("id")) == 16  # of each submission its own
    rendered[1]["data"]["submission.json"] = to_json(submission)
    assert rendered[1:] == read((DEPLOY / "example" / "digits.yaml").read_text())


def test_nodes_that_wait_together_for_one_do_not_use_up_what_the_job_may_fail() -> None:
    """Seven of eight that give up waiting at once would be more than six for the whole job."""
    job = manifests.runtime()["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert "backoffLimit" not in job and (job["backoffLimitPerIndex"], job["maxFailedIndexes"]) == (6, 0)
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # which Kubernetes asks for with these


def test_a_pod_is_never_root_and_can_do_nothing_that_it_need_not() -> None:
    """By the restricted pod security standard, which the namespace enforces."""
    pod = _pod_of(manifests.runtime())
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] == 1000
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC", "serviceAccountName"} & pod.keys()
    for container in pod["containers"]:
        rights = container["securityContext"]
        assert rights["capabilities"] == {"drop": ["ALL"]}
        assert rights["allowPrivilegeEscalation"] is False and rights["readOnlyRootFilesystem"] is True
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert all(volume.keys() - {"name"} <= {"persistentVolumeClaim", "emptyDir"} for volume in pod["volumes"])


def test_pods_of_a_run_talk_among_themselves_alone() -> None:
    policy = manifests.among_themselves("a", "b")["spec"]
    assert policy["podSelector"] == {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": "a"}}
    assert policy["ingress"] == [{"from": [{"podSelector": policy["podSelector"]}]}]
    closed = manifests.closed()["spec"]
    labels = manifests.runtime()["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    assert closed["podSelector"]["matchLabels"].items() <= labels["metadata"]["labels"].items()
    assert "ingress" not in closed


def test_a_task_file_of_any_bytes_arrives_as_it_is() -> None:
    found = manifests.submitted("a", "b", {"one": b"\xff\xfe", "two": b"text\n", "three": "more"})
    assert faults(found) == []
    assert base64.b64decode(found["binaryData"]["one"]) == b"\xff\xfe"
    assert found["data"] == {"two": "text\n", "three": "more"}


def test_a_text_is_read_back_as_it_was_whatever_is_in_it() -> None:
    from train.cluster.handed import to_yaml

    for text in ("yes", "1e3", "a: b", "- x\n- y\n", "tab\there\n", " leading\nand trailing \n", "no end", "é\n", ""):
        assert read(to_yaml([{"data": {"a": text}}])) == [{"data": {"a": text}}]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("folder", [DEPLOY, DEPLOY / "example"])
def test_kustomize_builds_what_the_files_say(folder: Path) -> None:
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=True)
    built = {(one["kind"], one["metadata"]["name"]): one for one in read(done.stdout)}
    files = [one for path in folder.glob("*.yaml") for one in read(path.read_text()) if "metadata" in one]
    assert built == {(one["kind"], one["metadata"]["name"]): one for one in files}

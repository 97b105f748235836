"""What a run is on Kubernetes: the one place that decides it. deploy/kubernetes shows the same with the reasons beside
it, and a test holds the two together.

A run is a TrainJob of Kubeflow Trainer v2 (docs/clusters.md has the version). What all runs of a namespace share is in
their TrainingRuntime: the pod that a node is. Trainer makes a JobSet of the two, that an Indexed Job, and that one pod
for each node.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from typing import Any

Manifest = dict[str, Any]

API = "trainer.kubeflow.org/v1alpha1"
NAMESPACE = RUNTIME = "trainstation"
RUNS_CLAIM, DATA_CLAIM = "trainstation-runs", "trainstation-data"
IMAGE, SHM, GRACE = "trainstation:runtime", "16Gi", 180
"""Defaults of what a run may choose: as in docker-compose.yml."""
RUNS, SUBMISSION = "/workspace/runs", "/submission"
"""Where a pod finds the claim for runs, and what was submitted."""
NODE = "node"
"""Of the job and of its container: Trainer knows them by this name."""
_OURS = {"app.kubernetes.io/name": "trainstation"}
SELECTOR = ",".join(f"{key}={value}" for key, value in _OURS.items())
"""What finds all that is ours, pods included."""
RUN, QUEUE = "jobset.sigs.k8s.io/jobset-name", "kueue.x-k8s.io/queue-name"
"""JobSet's label on every pod of a run, the run's name; and Kueue's on what it starts."""


@dataclasses.dataclass(frozen=True)
class FromSecret:
    """A variable's value that lies in a Secret of the namespace, and in no manifest."""

    secret: str
    key: str


def namespace() -> Manifest:
    """Where runs live. It refuses pods that ask for more than ours do."""
    labels = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": _OURS | labels}}


def claim(name: str, mode: str, size: str) -> Manifest:
    """Space on a disk of the cluster."""
    spec = {"accessModes": [mode], "resources": {"requests": {"storage": size}}}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": _meta(name, NAMESPACE), "spec": spec}


def runtime(name: str = RUNTIME, namespace: str = NAMESPACE) -> Manifest:
    """The pod that a node of a run is, and what becomes of it when it ends."""
    job = {
        "backoffLimitPerIndex": 6,
        "maxFailedIndexes": 0,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": {"containerName": NODE, "operator": "In", "values": [2, 3]}},
                {"action": "Ignore", "onExitCodes": {"containerName": NODE, "operator": "In", "values": [75]}},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "podReplacementPolicy": "Failed",
        "template": {"metadata": {"labels": _OURS}, "spec": _pod()},
    }
    template = {"metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}, "spec": job}
    metadata = _meta(name, namespace)
    metadata["labels"] = _OURS | {"trainer.kubeflow.org/framework": "torch"}
    return {
        "apiVersion": API,
        "kind": "TrainingRuntime",
        "metadata": metadata,
        "spec": {
            "mlPolicy": {"numNodes": 1, "torch": {}},
            "template": {
                "spec": {
                    "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
                    "replicatedJobs": [{"name": NODE, "replicas": 1, "template": template}],
                }
            },
        },
    }


def _pod() -> Manifest:
    container = {
        "name": NODE,
        "image": IMAGE,
        "command": ["/usr/bin/tini", "--", "train", "ls"],
        "env": [{"name": "HOME", "value": "/home/dev"}, {"name": "TRAIN_RUNS", "value": RUNS}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "runs", "mountPath": RUNS},
            {"name": "data", "mountPath": "/datasets", "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "home", "mountPath": "/home/dev"},
        ],
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "runAsGroup": 1000,
            "fsGroup": 1000,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            _claimed("runs", RUNS_CLAIM),
            _claimed("data", DATA_CLAIM),
            _shared_memory(SHM),
            {"name": "tmp", "emptyDir": {}},
            {"name": "home", "emptyDir": {}},
        ],
    }


def _claimed(name: str, claim: str) -> Manifest:
    return {"name": name, "persistentVolumeClaim": {"claimName": claim}}


def _shared_memory(size: str) -> Manifest:
    return {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}}


def submitted(name: str, namespace: str, files: Mapping[str, str | bytes]) -> Manifest:
    """The files of a submission, for every pod to read."""
    texts: dict[str, str] = {}
    bytes_: dict[str, str] = {}
    for file, content in files.items():
        try:
            texts[file] = content if isinstance(content, str) else content.decode()
        except UnicodeDecodeError:
            assert isinstance(content, bytes)
            bytes_[file] = base64.b64encode(content).decode()
    found = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _meta(name, namespace, name), "immutable": True}
    return found | ({"data": texts} if texts else {}) | ({"binaryData": bytes_} if bytes_ else {})


def among_themselves(name: str, namespace: str) -> Manifest:
    """Pods of this run may talk to each other, on any port; nobody else may come in."""
    pods = {"matchLabels": {RUN: name}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _meta(name, namespace, name),
        "spec": {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": pods}]}]},
    }


def closed() -> Manifest:
    """Nobody may come into a pod of ours but by a policy that says so."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _meta("trainstation-closed", NAMESPACE),
        "spec": {"podSelector": {"matchLabels": _OURS}, "policyTypes": ["Ingress"]},
    }


def train_job(
    name: str,
    namespace: str,
    command: list[str],
    *,
    runtime: str = RUNTIME,
    nodes: int = 1,
    nproc: int = 1,
    image: str | None = None,
    resources: Mapping[str, str] | None = None,
    environment: Mapping[str, str | FromSecret] | None = None,
    seconds: int | None = None,
    grace: int | None = None,
    runs_claim: str = RUNS_CLAIM,
    data_claim: str = DATA_CLAIM,
    shm: str = SHM,
    queue: str | None = None,
) -> Manifest:
    """A run.

    Args:
        command: of each node's container.
        nproc: ranks on each node.
        resources: of each node, by Kubernetes' names.
        seconds: after which the run is ended; its last checkpoint stays.
        grace: seconds from SIGTERM to SIGKILL, in which all ranks save.
        queue: the local queue of Kueue that starts it.
    """
    metadata = _meta(name, namespace, name)
    if queue:
        metadata["labels"] |= {QUEUE: queue}
    trainer: Manifest = {"image": image} if image else {}
    trainer |= {"command": command, "numNodes": nodes, "numProcPerNode": nproc}
    if environment:
        trainer["env"] = [{"name": name} | _value(value) for name, value in environment.items()]
    if resources:
        trainer["resourcesPerNode"] = {"requests": dict(resources), "limits": dict(resources)}
    pod: Manifest = {"terminationGracePeriodSeconds": grace} if grace and grace != GRACE else {}
    pod["containers"] = [
        {"name": NODE, "volumeMounts": [{"name": "submission", "mountPath": SUBMISSION, "readOnly": True}]}
    ]
    pod["volumes"] = [{"name": "submission", "configMap": {"name": name}}]
    pod["volumes"] += [_claimed("runs", runs_claim)] if runs_claim != RUNS_CLAIM else []
    pod["volumes"] += [_claimed("data", data_claim)] if data_claim != DATA_CLAIM else []
    pod["volumes"] += [_shared_memory(shm)] if shm != SHM else []
    patched = {"name": NODE, "template": {"spec": {"template": {"spec": pod}}}}
    spec: Manifest = {
        "runtimeRef": {"apiGroup": API.split("/")[0], "kind": "TrainingRuntime", "name": runtime},
        "trainer": trainer,
        "runtimePatches": [
            {
                "manager": "trainstation/submit",
                "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [patched]}}},
            }
        ],
    }
    if seconds is not None:
        spec["activeDeadlineSeconds"] = seconds
    return {"apiVersion": API, "kind": "TrainJob", "metadata": metadata, "spec": spec}


def _value(value: str | FromSecret) -> Manifest:
    # key by key: what Trainer lets a run change of a container has no envFrom
    if isinstance(value, FromSecret):
        return {"valueFrom": {"secretKeyRef": {"name": value.secret, "key": value.key}}}
    return {"value": value}


def _meta(name: str, namespace: str, run: str | None = None) -> Manifest:
    labels = _OURS | ({"trainstation/run": run} if run else {})
    return {"name": name, "namespace": namespace, "labels": labels}

"""What the controllers of a cluster and its machines do with a TrainJob, for the cluster that kubectl.py shows.

Pods are made, started as processes, asked to end, replaced; the TrainJob's conditions say how it stands. By the rules
that Trainer, JobSet and Job publish, as far as a run meets them: the pod failure policy of our runtime, suspension,
deletion in the foreground with what belongs to it, SIGTERM before SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import string
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from tests.train.cluster.kubectl import FINAL, Objects, locked, now
from tests.train.cluster.pods import Pods
from tests.train.conftest import Station
from train.cluster import manifests
from train.cluster.trainjob import INDEX

_POLICY = manifests.runtime()["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]
FAIL = next(rule["onExitCodes"]["values"] for rule in _POLICY["rules"] if rule["action"] == "FailJob")
"""Exit codes that end a job for good."""


class Controllers:
    """Of a namespace, in a thread.

    Args:
        station: its folder has the volume that pods see.
    """

    def __init__(self, cluster: Path, station: Station) -> None:
        self.cluster, self.station = cluster, station
        self.objects = Objects(cluster, "trainstation")
        self.full = cluster / "full"
        """While this file is there, no machine has room."""
        self._made: dict[str, Pods] = {}
        self._lives: dict[str, subprocess.Popen[bytes]] = {}
        """By the pod's name."""
        self._asked: dict[str, float] = {}
        (cluster / "logs").mkdir()
        (cluster / "controllers").touch()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep)
        self._thread.start()

    def _keep(self) -> None:
        while not self._over.wait(0.1):
            with locked(self.cluster):
                for job in self.objects.those("TrainJob", {}):
                    self._reconcile(job)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        for process in self._lives.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _reconcile(self, job: dict[str, Any]) -> None:
        pods = self.objects.those("Pod", {manifests.RUN: job["metadata"]["name"]})
        for pod in pods:
            self._look(pod)
        if job["metadata"].get("deletionTimestamp") or job["spec"].get("suspend"):
            self._wind_up(job, pods)
        elif not _has(job, "Complete") and not _has(job, "Failed"):
            if _drop(job, "Suspended"):
                self.objects.write(job)
            self._further(job, pods)

    def _look(self, pod: dict[str, Any]) -> None:
        """Kubelet: how is its process?"""
        name = pod["metadata"]["name"]
        process = self._lives.get(name)
        if process is None or pod["status"]["phase"] in FINAL or (code := process.poll()) is None:
            return
        ended = {"exitCode": 128 - code if code < 0 else code, "reason": "Error" if code else "Completed"}
        pod["status"] |= {
            "phase": "Failed" if code else "Succeeded",
            "containerStatuses": [{"name": "node", "state": {"terminated": ended}}],
        }
        self.objects.write(pod)

    def _wind_up(self, job: dict[str, Any], pods: list[dict[str, Any]]) -> None:
        for pod in pods:
            name = pod["metadata"]["name"]
            if pod["status"]["phase"] in FINAL or name not in self._lives:
                self.objects.remove(pod)
                continue
            grace = pod["metadata"].get("deletionGracePeriodSeconds", 180)
            if name not in self._asked:
                self._asked[name] = time.monotonic()
                self._lives[name].terminate()
                self.objects.write(pod | {"metadata": pod["metadata"] | {"deletionTimestamp": now()}})
            elif time.monotonic() - self._asked[name] > grace:
                os.killpg(self._lives[name].pid, signal.SIGKILL)
        if self.objects.those("Pod", {manifests.RUN: job["metadata"]["name"]}):
            return
        if job["metadata"].get("deletionTimestamp"):
            self.objects.remove(job)
        elif not _has(job, "Suspended"):
            self._say(job, "Suspended", "Suspended", "TrainJob is suspended")

    def _further(self, job: dict[str, Any], pods: list[dict[str, Any]]) -> None:
        nodes = range(job["spec"]["trainer"]["numNodes"])
        newest = [_newest(pods, node) for node in nodes]
        for pod in filter(None, newest):
            code = _code(pod)
            if code in FAIL:
                name = pod["metadata"]["name"]
                text = f"Container node for pod trainstation/{name} failed with exit code {code} matching FailJob rule"
                self._say(job, "Failed", "PodFailurePolicy", text)
                for other in pods:
                    if _code(other) is None and other["metadata"]["name"] in self._lives:
                        self._lives[other["metadata"]["name"]].terminate()
                return
        if all(pod is not None and pod["status"]["phase"] == "Succeeded" for pod in newest):
            self._say(job, "Complete", "AllJobsCompleted", "jobset completed successfully")
            return
        for node, pod in zip(nodes, newest, strict=True):
            if pod is None or pod["status"]["phase"] == "Failed":
                self._schedule(job, node)
            elif pod["status"]["phase"] == "Pending" and not self.full.exists():
                self._start(job, pod, node)

    def _schedule(self, job: dict[str, Any], node: int) -> None:
        random_ = "".join(random.choices(string.ascii_lowercase, k=5))
        run = job["metadata"]["name"]
        labels = dict([manifests.SELECTOR.split("=")]) | {manifests.RUN: run, INDEX: str(node)}
        waits = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                 "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."}  # fmt: skip
        metadata = {"name": f"{run}-node-0-{node}-{random_}", "labels": labels, "creationTimestamp": now()}
        metadata |= {"namespace": "trainstation", "uid": f"uid-of-{random_}"}
        status = {"phase": "Pending", "conditions": [waits] if self.full.exists() else []}
        self.objects.write({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {}, "status": status})

    def _start(self, job: dict[str, Any], pod: dict[str, Any], node: int) -> None:
        name, uid = pod["metadata"]["name"], job["metadata"]["uid"]
        files = self.objects.read("ConfigMap", job["metadata"]["name"])
        if files is None:
            return  # FailedMount: kubelet tries again
        if uid not in self._made:
            self._made[uid] = Pods(self.station, {"TrainJob": job, "ConfigMap": files})
        self._lives[name] = self._made[uid].start(node, self.cluster / "logs" / name)
        pod["spec"]["nodeName"] = f"machine{node}"
        pod["status"] = {"phase": "Running", "containerStatuses": [{"name": "node", "state": {"running": {}}}]}
        self.objects.write(pod)

    def _say(self, job: dict[str, Any], kind: str, reason: str, text: str) -> None:
        said = {"type": kind, "status": "True", "reason": reason, "message": text, "lastTransitionTime": now()}
        _drop(job, "Suspended")
        job.setdefault("status", {}).setdefault("conditions", []).append(said)
        self.objects.write(job)


def _newest(pods: list[dict[str, Any]], node: int) -> dict[str, Any] | None:
    mine = [pod for pod in pods if pod["metadata"]["labels"][INDEX] == str(node)]
    return max(mine, key=lambda pod: pod["metadata"]["creationTimestamp"], default=None)


def _code(pod: dict[str, Any]) -> int | None:
    """Its exit code."""
    for container in pod["status"].get("containerStatuses", ()):
        if "terminated" in container["state"]:
            return int(container["state"]["terminated"]["exitCode"])
    return None


def _has(job: dict[str, Any], kind: str) -> bool:
    return any(one["type"] == kind for one in job.get("status", {}).get("conditions", ()))


def _drop(job: dict[str, Any], kind: str) -> bool:
    """Take a condition away; whether it was there."""
    before = job.get("status", {}).get("conditions", [])
    job.setdefault("status", {})["conditions"] = [one for one in before if one["type"] != kind]
    return len(job["status"]["conditions"]) < len(before)

"""How a TrainJob stands, from what a cluster says of it and of its pods. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from train.cluster.manifests import QUEUE, RUN
from train.cluster.submission import Standing
from train.errors import one_line
from train.record import store

Object = Mapping[str, Any]
INDEX = "batch.kubernetes.io/job-completion-index"
"""The Indexed Job's label on a pod: the node that it is."""
_ENDED = ("Succeeded", "Failed")
"""Phases of a pod that nothing more comes of."""


def standings(objects: Iterable[Object]) -> dict[str, Standing]:
    """How all TrainJobs among these objects stand, by name, with the pods among them."""
    found = list(objects)
    return {
        one["metadata"]["name"]: standing(one, pods_of(found, one["metadata"]["name"]))
        for one in found
        if one["kind"] == "TrainJob"
    }


def pods_of(objects: Iterable[Object], name: str) -> list[Object]:
    """A run's pods, by node; of a node the oldest first."""
    pods = [one for one in objects if one["kind"] == "Pod" and _labels(one).get(RUN) == name]
    return sorted(pods, key=lambda pod: (node_of(pod), pod["metadata"].get("creationTimestamp", "")))


def node_of(pod: Object) -> int:
    """Which node a pod is, from 0."""
    return int(_labels(pod).get(INDEX, 0))


def standing(job: Object, pods: list[Object]) -> Standing:
    """How a TrainJob stands.

    Args:
        pods: its own, as `pods_of` has them.
    """
    parts = tuple(map(_line, pods))
    living = [pod for pod in pods if phase(pod) not in _ENDED]
    running = [pod for pod in living if phase(pod) == "Running"]
    if (said := _condition(job, "Complete")) is not None:
        return Standing(False, "its trainjob is complete", store.FINISHED, parts)
    if (said := _condition(job, "Failed")) is not None:
        return Standing(False, _words(said) or "its trainjob has failed", store.FAILED, parts)
    if job["metadata"].get("deletionTimestamp"):
        return Standing(True, f"its trainjob is being deleted; {_count(living)} left", None, parts)
    if job["spec"].get("suspend"):
        if living:
            return Standing(True, f"being suspended; {_count(living)} left", None, parts)
        if _labels(job).get(QUEUE):  # Kueue holds it so until there is room
            return Standing(False, f"waits in queue {_labels(job)[QUEUE]}", None, parts)
        return Standing(False, "its trainjob is suspended", store.STOPPED, parts)
    nodes = job["spec"].get("trainer", {}).get("numNodes", 1)
    if running:
        less = f"{len(running)} of {nodes}" if len(running) < nodes else str(nodes)
        return Standing(True, f"{less} pod{'s run' if nodes > 1 else ' runs'}{_waits(living)}", None, parts)
    return Standing(False, f"{len(living)} of {nodes} pods are there{_waits(living)}", None, parts)


def suspended(job: Object) -> bool:
    """Whether it rests by `spec.suspend`."""
    return bool(job and job["spec"].get("suspend"))


def _count(pods: list[Object]) -> str:
    return f"{len(pods)} pod{'s are' if len(pods) != 1 else ' is'}"


def _waits(pods: list[Object]) -> str:
    """Why the first of them that does not run does not."""
    for pod in pods:
        if phase(pod) == "Pending":
            return f"; node {node_of(pod)} waits: {_why(pod) or 'its container is not there yet'}"
    return ""


def _line(pod: Object) -> str:
    """A pod, for people."""
    where = pod["spec"].get("nodeName")
    why = _why(pod)
    text = f"node {node_of(pod)}: {pod['metadata']['name']} {'Ending' if _is_ending(pod) else phase(pod)}"
    return text + (f" on {where}" if where else "") + (f" ({why})" if why else "")


def _is_ending(pod: Object) -> bool:
    return "deletionTimestamp" in pod["metadata"] and phase(pod) not in _ENDED


def _why(pod: Object) -> str:
    """Why a pod is as it is, in a line; '' where nothing is said."""
    status = pod.get("status", {})
    for container in status.get("containerStatuses") or ():
        waits, ended = (container.get("state", {}).get(key) for key in ("waiting", "terminated"))
        if waits:
            return _words(waits)
        if ended:
            return f"exit code {ended.get('exitCode')}{', ' + ended['reason'] if ended.get('reason') else ''}"
    for one in status.get("conditions") or ():
        if one["type"] == "PodScheduled" and one["status"] != "True":
            return _words(one)
    return _words(status)


def _words(said: Mapping[str, Any]) -> str:
    """`reason: message` of whatever has them."""
    return one_line(": ".join(filter(None, (said.get("reason"), said.get("message")))))


def _condition(job: Object, kind: str) -> Mapping[str, Any] | None:
    """A condition of its status that holds."""
    conditions = job.get("status", {}).get("conditions") or ()
    return next((one for one in conditions if one["type"] == kind and one["status"] == "True"), None)


def phase(pod: Object) -> str:
    """What Kubernetes calls the state of a pod."""
    return str(pod.get("status", {}).get("phase", "Pending"))


def _labels(one: Object) -> Mapping[str, str]:
    return one["metadata"].get("labels") or {}

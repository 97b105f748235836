"""What the pods of a run print, by kubectl logs."""

from __future__ import annotations

import contextlib
import datetime
import subprocess
import sys
from typing import Any

from train.cluster import trainjob
from train.cluster.kubectl import Cluster, understood
from train.cluster.manifests import NODE, RUN
from train.cluster.submission import Silent
from train.errors import Refused
from train.record import store
from train.record.store import Run

_LAST = 10.0
"""Seconds for what is left of a log when its run has ended."""


def print_log(run: Run, rank: int) -> None:
    """Print what the newest pod of that rank's node has said.

    Raises:
        Refused: there is none, or the cluster does not answer.
    """
    cluster, node = _node_of(run, rank)
    pod = _newest(cluster, run.name, node)
    if pod is None:
        raise Refused(
            f"{run.name} has no pod of node {node} that has begun; wait for it with: train logs {run.name} --follow; "
            "what ranks printed before lies in the cluster, in the claim for runs"
        )
    sys.stdout.write(cluster.said("logs", *_output(pod)))
    sys.stdout.flush()


def _node_of(run: Run, rank: int) -> tuple[Cluster, int]:
    record = run.read()
    if rank >= record["world_size"]:
        raise Refused(f"{run.name} has no rank {rank}: they are counted from 0 to {record['world_size'] - 1}")
    return Cluster.at(record["submitted"]["at"]), rank // record["nproc"]


def _newest(cluster: Cluster, name: str, node: int) -> trainjob.Object | None:
    """The pod of a node that has begun last."""
    pods = cluster.those("pod", f"{RUN}={name},{trainjob.INDEX}={node}")
    with understood():
        begun = [pod for pod in trainjob.pods_of(pods, name) if trainjob.phase(pod) != "Pending"]
        return begun[-1] if begun and begun[-1]["metadata"]["uid"] else None


def _output(pod: trainjob.Object) -> tuple[str, str]:
    """Of its node, whatever else a cluster puts into its pods."""
    return f"pod/{pod['metadata']['name']}", f"--container={NODE}"


class PodLog:
    """The output of a node, whichever pod it is just now.

    Raises:
        Refused: the run has no such rank.
    """

    def __init__(self, run: Run, rank: int) -> None:
        self._name = run.name
        self._cluster, self._node = _node_of(run, rank)
        self._pod = ""
        """The uid of the one that was shown last."""
        self._reader: subprocess.Popen[bytes] | None = None
        self._since = ""

    def update(self, record: dict[str, Any]) -> None:
        """Follow the newest pod; of a run that has ended, to its end."""
        if self._reader is None or self._reader.poll() is not None:
            with contextlib.suppress(Silent):  # who asks how the run stands says so
                self._begin()
        else:
            self._since = _now()
        if self._reader is not None and record["state"] not in (store.CREATED, store.QUEUED, store.RUNNING):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._reader.wait(_LAST)

    def _begin(self) -> None:
        pod = _newest(self._cluster, self._name, self._node)
        if pod is None:
            return
        uid = pod["metadata"]["uid"]
        if uid == self._pod and trainjob.phase(pod) != "Running":
            return
        again = [f"--since-time={self._since}"] if uid == self._pod else []  # the connection was cut
        self._pod, self._since = uid, _now()
        command = self._cluster.command("logs", *_output(pod), "--follow", *again, patience=0)
        # in a session of its own: Ctrl-C is for who follows
        self._reader = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def close(self) -> None:
        """Follow no more."""
        if self._reader is not None:
            self._reader.terminate()
            self._reader.wait()


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")

"""The pods of a TrainJob, as processes: its command, in the environment that Kubeflow Trainer gives, with a volume that
all see."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ports import free_port
from tests.train.conftest import PATIENCE, Station
from train.cluster import manifests


class Pods:
    """The pods of one run.

    Args:
        found: its TrainJob and its ConfigMap.
    """

    def __init__(self, station: Station, found: dict[str, Any]) -> None:
        self.trainer = found["TrainJob"]["spec"]["trainer"]
        self.submission = station.folder / "submission"
        lies = self.submission / "..data"  # as kubelet lays a ConfigMap down: links, for which the files can be changed
        lies.mkdir(parents=True, exist_ok=True)
        files = {name: text.encode() for name, text in found["ConfigMap"]["data"].items()}
        files |= {name: base64.b64decode(text) for name, text in found["ConfigMap"].get("binaryData", {}).items()}
        for name, content in files.items():
            (lies / name).write_bytes(content)
            (self.submission / name).unlink(missing_ok=True)
            (self.submission / name).symlink_to(Path("..data") / name)
        self.volume = station.folder / "volume"
        self.stations = [Station(station.folder / f"pod{node}") for node in range(self.trainer["numNodes"])]
        for node, one in enumerate(self.stations):
            one.folder.mkdir(exist_ok=True)
            one.runs = self.volume / ".nodes" / str(node) if node else self.volume
        self.port = free_port()
        self.lives: list[subprocess.Popen[bytes]] = []

    @classmethod
    def of(cls, station: Station, *submit: object) -> Pods:
        """Of a run `a` of one rank a node, as --dry-run shows it."""
        said = station.ok("submit", *submit, "--on", "kubernetes", "--name", "a", "--nproc", 1, "--dry-run").stdout
        return cls(station, {one["kind"]: one for one in yaml.safe_load_all(said) if one})

    def start(self, node: int, file: Path | None = None, **environment: str) -> subprocess.Popen[bytes]:
        """A pod: node's container. What it says goes into that file, else where `log` finds it."""
        given = {
            "PET_NNODES": str(self.trainer["numNodes"]), "PET_NPROC_PER_NODE": str(self.trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(node), "PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": str(self.port),
            "TRAIN_RUNS": str(self.volume),
        }  # fmt: skip
        assert self.trainer["command"][:3] == ["/usr/bin/tini", "--", "python3"]
        command = [one.replace(manifests.SUBMISSION, str(self.submission), 1) for one in self.trainer["command"][3:]]
        with (file or self.stations[node].folder / "log").open("ab") as log:
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

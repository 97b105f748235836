"""The health check's look at the GPUs, with devices and an nvidia-smi that stand in for real ones. Needs no engine."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.turns

SCRIPT = Path(__file__).parents[2] / "docker/rootfs/usr/local/lib/trainstation/gpus"


class Machine:
    """Two GPUs, as a container sees them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, folder / "calls"
        self.seen = folder / "seen"
        (folder / "dev").mkdir()
        for number in (0, 1):
            (folder / "dev" / f"nvidia{number}").touch()
        self.smi("echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'; echo 'GPU 1: NVIDIA H100 (UUID: GPU-2)'")

    def smi(self, body: str) -> None:
        program = self.folder / "nvidia-smi"
        program.write_text(f"#!/bin/sh\necho called >>{self.calls}\n{body}\n")
        program.chmod(0o755)

    def look(self, wanted: str = "all") -> subprocess.CompletedProcess[str]:
        env = {
            "PATH": f"{self.folder}:{os.environ['PATH']}", "STATION_GPUS": wanted, "GPUS_SEEN": str(self.seen),
            "GPUS_DEV": str(self.folder / "dev"),
        }  # fmt: skip
        return subprocess.run(["bash", "-p", str(SCRIPT)], env=env, capture_output=True, text=True, check=False)

    @property
    def asked(self) -> int:
        return len(self.calls.read_text().split()) if self.calls.exists() else 0


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_nvidia_smi_is_asked_once_a_minute(machine: Machine) -> None:
    for _ in range(3):
        assert machine.look().returncode == 0
    assert machine.asked == 1
    machine.seen.write_text(f"{int(time.time()) - 61}\n")
    assert machine.look().returncode == 0
    assert machine.asked == 2


def test_a_device_that_cannot_be_opened_is_noticed_at_once(machine: Machine) -> None:
    assert machine.look().returncode == 0
    device = machine.folder / "dev" / "nvidia1"
    device.unlink()
    # a socket cannot be opened by anybody, root neither: ENXIO
    with socket.socket(socket.AF_UNIX) as closed:
        closed.bind(str(device))
        done = machine.look()
    assert done.returncode == 1 and "nvidia1 cannot be opened" in done.stdout and "make down up" in done.stdout
    assert machine.asked == 1


def test_what_nvidia_smi_misses_is_asked_again_each_time(machine: Machine) -> None:
    assert "shows 2" in machine.look("0,1,2").stdout
    assert "shows 2" in machine.look("0,1,2").stdout
    machine.smi("echo Failed to initialize NVML: Unknown Error; exit 255")
    assert "nvidia-smi fails: Failed to initialize NVML" in machine.look().stdout
    assert machine.asked == 3


def test_nothing_is_asked_where_no_gpu_was_wanted(machine: Machine) -> None:
    assert machine.look("none").returncode == 0 and machine.asked == 0

"""Two nodes in two network namespaces: the way between them is found, cut and mended, and loses packets."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from tests.train.cluster.conftest import Machines
from tests.train.conftest import PATIENCE, Station
from train.nodes import address

NAME = f"train{os.getpid() % 10000}"
HERE, THERE = f"{NAME}a", f"{NAME}b"
"""The two ends of a wire."""


def ip(*arguments: str) -> bool:
    return subprocess.run(["ip", *arguments], capture_output=True, check=False).returncode == 0


class Elsewhere(Station):
    """A station in a network namespace of its own."""

    def __call__(self, *arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["ip", "netns", "exec", NAME, sys.executable, "-m", "train", *map(str, arguments)],
            cwd=self.folder, env=self.environment() | (env or {}), stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip


INSIDE = ("netns", "exec", NAME, "ip")


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Machines]:
    """Two machines, the second one in a namespace, and nothing between them yet."""
    if os.geteuid() or shutil.which("ip") is None or not ip("netns", "add", NAME):
        pytest.skip("needs root and network namespaces")
    made = Machines(tmp_path, 2)
    made.stations[1] = Elsewhere(made.stations[1].folder)
    made.rendezvous = f"198.51.100.1:{free_port()}"
    try:
        assert ip(*INSIDE, "link", "set", "lo", "up")
        yield made
    finally:
        made.close()
        ip("netns", "delete", NAME)


@pytest.fixture
def far(apart: Machines) -> Iterator[Machines]:
    """With a wire between them."""
    try:
        assert ip("link", "add", HERE, "type", "veth", "peer", "name", THERE, "netns", NAME)
        assert ip("addr", "add", "198.51.100.1/30", "dev", HERE) and ip("link", "set", HERE, "up")
        assert ip(*INSIDE, "addr", "add", "198.51.100.2/30", "dev", THERE) and ip(*INSIDE, "link", "set", THERE, "up")
        yield apart
    finally:
        apart.close()
        ip("link", "delete", HERE)


@pytest.mark.minutes
def test_a_wire_is_found_cut_and_mended(far: Machines, like_alone: Any) -> None:
    far.launch_all("a", "--steps", 900)
    far.wait("a", 1, lambda record: record["step"] >= 100, "step 100")
    assert [station.record("a")["interface"] for station in far.stations] == [HERE, THERE]
    ip("link", "set", HERE, "down")  # nobody hears of it: no connection is closed
    far.wait_for_reason("a", 0, "waiting for node 1 of 2")
    far.wait_for_reason("a", 1, "waiting for node 0 of 2")
    ip("link", "set", HERE, "up")
    like_alone(far, "a", 2, 900)


@pytest.mark.minutes
def test_a_name_that_node_0_has_for_itself_alone_is_not_its_way_to_the_others(far: Machines, like_alone: Any) -> None:
    """As Debian has it: in /etc/hosts a machine's own name is 127.0.1.1."""
    port = address.parse(far.rendezvous).port
    for node, host in enumerate(("127.0.1.1", "198.51.100.1")):
        far.rendezvous = f"{host}:{port}"
        assert far.launch("a", node, "--steps", 40).returncode == 0
    like_alone(far, "a", 2, 40)
    assert [station.record("a")["interface"] for station in far.stations] == [HERE, THERE]


@pytest.mark.minutes
def test_lost_packets_cost_time_alone(far: Machines, like_alone: Any) -> None:
    if shutil.which("iptables") is None:
        pytest.skip("needs iptables")
    for chain in ("INPUT", "OUTPUT"):
        lose = ["-A", chain, "-m", "statistic", "--mode", "random", "--probability", "0.05", "-j", "DROP"]
        subprocess.run(["ip", "netns", "exec", NAME, "iptables", *lose], check=True)
    far.launch_all("a", "--steps", 300)
    like_alone(far, "a", 2, 300)
    for station in far.stations:
        assert len(station.record("a")["attempts"]) == 1  # nobody was taken for dead

"""Stations of two checkouts in a network that both engines' machines would share: each has an address of its own there.

Here the network is a bridge of one engine; on several machines it is an ipvlan or an overlay (docs/clusters.md).
"""

from __future__ import annotations

import ipaddress
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from conftest import Station, run

from tests.waiting import eventually

pytestmark = pytest.mark.turns


@dataclass
class Shared:
    """A network, by name, and its addresses."""

    name: str
    subnet: ipaddress.IPv4Network

    def address(self, number: int) -> str:
        return str(self.subnet[number])


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    name = f"station-test-{os.getpid()}-machines"
    run("docker", "network", "create", name)  # the engine knows which addresses are free
    try:
        found = json.loads(run("docker", "network", "inspect", name).stdout)[0]["IPAM"]["Config"][0]["Subnet"]
        run("docker", "network", "rm", name)
        # an address can be asked for only where the subnet was
        run("docker", "network", "create", "--subnet", found, name)
        yield Shared(name, ipaddress.IPv4Network(found))
    finally:
        run("docker", "network", "rm", name, check=False)


def test_stations_of_two_machines_train_together_at_addresses_of_their_own(
    station: Station, make_station: Callable[..., Station], shared: Shared
) -> None:
    settings = [{"CLUSTER_NETWORK": shared.name, "CLUSTER_ADDRESS": shared.address(50 + node)} for node in range(2)]
    both = [make_station(f"machine{node}", **settings[node]) for node in range(2)]
    try:
        for one in both:
            one.make("up")
        _train(both, shared)
        _keep_to_themselves(both, shared)
    finally:
        for one in both:  # the network goes before other fixtures do
            one.make("clean-station", check=False)


def _train(both: list[Station], shared: Shared) -> None:
    fields = ("--steps", "200", "--log.every_steps", "10")
    nodes = ("--name", "both", "--nproc", "1", "--nnodes", "2", "--rendezvous", f"{shared.address(50)}:29400")
    for number, one in enumerate(both):
        one.dev("train", "launch", "digits", *nodes, "--node-rank", str(number), *fields)
    for one in both:
        eventually("the run is over", lambda one=one: one.show("both")["state"] == "finished")
    records = [one.show("both") for one in both]
    both[0].dev("train", "run", "digits", "--name", "alone", "--spawn", "2", *fields)
    digests = {record["weights_sha256"] for record in [*records, both[0].show("alone")]}
    assert len(digests) == 1
    for number, one in enumerate(both):
        told = "{a.address: name for name, all in psutil.net_if_addrs().items() for a in all}"
        ask = f"import json, psutil; print(json.dumps({told}))"
        interfaces = json.loads(one.dev("python", "-c", ask).stdout)
        assert records[number]["interface"] == interfaces[shared.address(50 + number)]


def _keep_to_themselves(both: list[Station], shared: Shared) -> None:
    ports = json.loads(both[0].inspect("{{json .HostConfig.PortBindings}}"))
    assert {key: [one["HostIp"] for one in value] for key, value in ports.items()} == {
        "8888/tcp": ["127.0.0.1"], "2222/tcp": ["127.0.0.1"],
    }  # fmt: skip
    asks = ("curl", "-sS", "-o", "/dev/null", "-m", "5", "-w", "%{http_code}")
    there = both[1].dev(*asks, f"http://{shared.address(50)}:9477/metrics", check=False)
    assert there.returncode == 7  # nobody listens
    networks = json.loads(both[0].inspect("{{json .NetworkSettings.Networks}}"))
    own = networks[f"{both[0].project}_default"]["IPAddress"]
    assert both[0].dev(*asks, f"http://{own}:9477/metrics").stdout == "200"
    # JupyterLab is there, for those who have its token
    assert both[1].dev(*asks, f"http://{shared.address(50)}:8888/api/contents").stdout == "403"

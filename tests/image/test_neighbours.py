"""A neighbour on the network, which adds a route to the containers: a network namespace with a link of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from conftest import Station, run

SEGMENT = "10.213.77"
pytestmark = [pytest.mark.never_forgiven, pytest.mark.turns]
RULE = ("DOCKER-USER", "-j", "TRAINSTATION")


@pytest.fixture
def ask(station: Station) -> Iterator[Callable[[], str]]:
    """What a neighbour gets from the container: the HTTP status of JupyterLab's login page, 000 for no answer."""
    name, here, there = f"station-test-{os.getpid()}", "stn-test-here", "stn-test-there"
    container = station.inspect("{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}")
    lines = f"""
        ip netns add {name}
        ip link add {here} type veth peer name {there}
        ip link set {there} netns {name}
        ip addr add {SEGMENT}.1/24 dev {here}
        ip link set {here} up
        ip -n {name} addr add {SEGMENT}.2/24 dev {there}
        ip -n {name} link set {there} up
        ip -n {name} route add {container}/32 via {SEGMENT}.1
    """
    with ExitStack() as at_end:
        at_end.callback(run, "ip", "netns", "del", name, check=False)
        for line in lines.strip().splitlines():
            run(*line.split())
        curl = ("ip", "netns", "exec", name, "curl", "-sS", "-o", "/dev/null", "-m", "5", "-w", "%{http_code}")
        yield lambda: run(*curl, f"http://{container}:8888/login", check=False).stdout


def doctor(station: Station) -> str:
    return run("python3", "-m", "train", "doctor", "--only", "neighbours", cwd=station.folder, check=False).stdout


def test_a_route_to_the_containers_network_leads_past_no_address(station: Station, ask: Callable[[], str]) -> None:
    assert ask() == "000"
    assert "can reach ports" not in doctor(station)
    if int(run("docker", "version", "-f", "{{.Server.Version}}").stdout.split(".")[0]) >= 28:
        return  # it needs no rule of ours
    run("iptables", "-D", *RULE)
    try:
        assert ask() == "200"  # what the rule is for
        assert "sudo make engine" in doctor(station)
    finally:
        printed = station.make("up").stdout
    assert "machines of the same network no longer reach containers" in printed
    assert ask() == "000"
    for _ in range(2):
        station.make("engine")
    assert run("iptables", "-S", "DOCKER-USER").stdout.count("TRAINSTATION") == 1
    assert run("iptables", "-S", "TRAINSTATION").stdout.count("DROP") == 2
    assert run("curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", f"{station.url}/login").stdout == "200"

"""Checks of the host of the station: Docker, and whether containers get GPUs. For `make doctor`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from .finding import Finding, not_applicable, ok, problem, warning
from .machine import Machine

COMPOSE = (2, 24)
"""The oldest version of docker compose that reads docker-compose.yml."""

GUARDED = 28
"""The first version of Docker that keeps other machines of the network from a container's own address."""


def checks(machine: Machine) -> Iterator[Finding]:
    """Yield all checks of the host's engine; none inside the station, or in a container without an engine."""
    output = None if machine.is_station else machine.run("docker", "info", "--format", "{{json .}}")
    if machine.is_container and (output is None or output.code != 0):
        return
    if output is None:
        yield not_applicable("Docker", "not installed; only the station needs it. To install it, as root: make engine")
        return
    try:
        answer = json.loads(output.out)
    except (ValueError, RecursionError):
        answer = None
    info: dict[str, Any] = answer if isinstance(answer, dict) else {}
    errors = info.get("ServerErrors") or []
    if output.code != 0 or errors or not info.get("ServerVersion"):
        message = str(errors[0]) if errors else output.first_line
        if "permission denied" in message:
            yield problem("Docker", "you may not use the engine", "sudo usermod -aG docker $USER  # then log in again")
        else:
            yield problem(
                "Docker", f"no engine answers: {message[:120]}", "make engine  # or: sudo systemctl start docker"
            )
        return
    yield ok("Docker", f"{info['ServerVersion']}")
    yield _compose(machine)
    yield _buildx(machine)
    yield _neighbours(machine, info)
    yield from _gpus(machine, info)


def _compose(machine: Machine) -> Finding:
    output = machine.run("docker", "compose", "version", "--short")
    found = re.match(r"v?(\d+)\.(\d+)", output.out.strip()) if output and output.code == 0 else None
    if not found or output is None:
        return problem("docker compose", "the plugin is missing", "make engine")
    if (int(found.group(1)), int(found.group(2))) < COMPOSE:
        seen = f"{output.out.strip()} is older than {COMPOSE[0]}.{COMPOSE[1]}"
        return problem("docker compose", seen, "make engine")
    return ok("docker compose", output.out.strip())


def _buildx(machine: Machine) -> Finding:
    output = machine.run("docker", "buildx", "version")
    if output is None or output.code != 0:
        return problem("docker buildx", "the plugin is missing; building the image needs it", "make engine")
    return ok("docker buildx", " ".join(output.out.split()[1:2]) or "there")


def _neighbours(machine: Machine, info: dict[str, Any]) -> Finding:
    """Check whether machines of the same network can reach ports that are published only on 127.0.0.1.

    They can by adding a route. Docker prevents it since version 28. Before, `make engine` sets a rule
    (scripts/firewall.sh).
    """
    name, version = "neighbours", str(info["ServerVersion"])
    elsewhere = "rootless" in str(info.get("SecurityOptions")) or info.get("OperatingSystem") == "Docker Desktop"
    if elsewhere:
        return not_applicable(name, "containers of this engine have no address in this machine's network")
    if int((re.match(r"\d+", version) or ["0"])[0]) >= GUARDED:
        return ok(name, f"Docker {version} blocks other machines from ports published on 127.0.0.1")
    asked = machine.run("iptables", "-w", "5", "-C", "DOCKER-USER", "-j", "TRAINSTATION")
    has_mark = machine.path("/run/trainstation-firewall").exists()
    if asked is not None and asked.code == 0:
        return ok(name, "a firewall rule blocks other machines from ports published on 127.0.0.1")
    may_not_ask = asked is None or "ermission denied" in asked.error
    if may_not_ask and has_mark:
        return ok(name, "a firewall rule was set since the last boot (only root can see whether it still exists)")
    seen = f"other machines can reach ports published on 127.0.0.1: Docker {version} < {GUARDED}, no firewall rule"
    return warning(name, seen, "sudo make engine  # sets a firewall rule")


def _gpus(machine: Machine, info: dict[str, Any]) -> Iterator[Finding]:
    """Check that containers get GPUs: NVIDIA's toolkit is known to the engine as a runtime or by CDI."""
    name = "container toolkit"
    if not machine.wants_gpus():
        yield not_applicable(name, "this machine has no NVIDIA GPU")
        return
    tool = machine.run("nvidia-ctk", "--version")
    hook = machine.run("nvidia-container-runtime-hook", "-version")
    if tool is None and hook is None:
        yield problem(name, "not installed: containers get no GPU", "sudo apt-get install nvidia-container-toolkit")
        return
    is_known = "nvidia" in (info.get("Runtimes") or {}) or bool(info.get("CDISpecDirs"))
    if not is_known:
        seen = "installed, but the engine is not configured for it"
        yield problem(name, seen, "sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker")
        return
    version = re.search(r"\d+\.\d+(\.\d+)?", tool.out) if tool else None
    yield ok(name, f"{version.group() if version else 'installed'}, and the engine is configured for it")
    yield _stay(machine, info)


def _stay(machine: Machine, info: dict[str, Any]) -> Finding:
    """Check that running containers keep their GPUs when systemd reloads its units.

    If systemd manages the control groups, it rewrites their device rules, and finds the GPUs only by links in /dev/char
    (NVIDIA/nvidia-container-toolkit#48).
    """
    name, driver = "GPUs stay", info.get("CgroupDriver", "unknown")
    if driver != "systemd":
        return ok(name, f"a systemctl daemon-reload takes no GPUs away: the engine's cgroup driver is {driver}")
    links = (machine.path(f"/dev/char/{each}") for each in machine.list("/dev/char"))
    if any("nvidia" in link.resolve().name for link in links if link.is_symlink()):
        return ok(name, "a systemctl daemon-reload takes no GPUs away: there are links in /dev/char")
    seen = "a systemctl daemon-reload takes GPUs from running containers: the engine's cgroup driver is systemd"
    now = "sudo nvidia-ctk system create-dev-char-symlinks --create-all  # until the next boot"
    for_good = '"exec-opts": ["native.cgroupdriver=cgroupfs"] in /etc/docker/daemon.json, then restart the engine'
    return warning(name, seen, f"{now}; for good: {for_good}")

"""A Slurm cluster of containers: a login machine, a controller and three nodes, with a network of their own and a
folder that they share. All that it makes has its name, and is taken away with it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import shlex
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import run

from tests.train.slurm.conf import slurm_conf
from tests.waiting import eventually

NODES = ("node0", "node1", "node2")
PARTS = {**dict.fromkeys(NODES, "slurmd"), "controller": "slurmctld", "login": "login"}
"""The machines, and what each does; a node more than a run takes."""
SHARED = "/shared"
"""The folder that login machine and nodes see, as those of a cluster do."""
_FOLDER = "/var/lib/trainstation-slurm"


class Cluster:
    """Its machines, by their host names.

    Args:
        station: the image that users have.
        checkout: the files of this checkout.
    """

    def __init__(self, station: str, checkout: Path) -> None:
        self.name = f"slurm-test-{uuid.uuid4().hex[:8]}"
        self.addresses: dict[str, str] = {}
        build = ("--file", str(checkout / "tests/image/slurm/Dockerfile"), "--build-arg", f"STATION={station}")
        run("docker", "build", "--network", "host", "--tag", self.name, *build, str(checkout), timeout=600)

    def start(self) -> None:
        """All of it; returns when jobs can run."""
        self._make_network()
        run("docker", "volume", "create", self.name)
        conf = slurm_conf("controller", ("slurm", "root"), _FOLDER, "node[0-2]")
        fill = f"""
            mkdir -m 700 {SHARED}/.cluster; head -c 1024 /dev/urandom >{SHARED}/.cluster/munge.key
            cat >{SHARED}/.cluster/slurm.conf; chown dev: {SHARED}"""
        once = ("run", "--rm", "--interactive", "--volume", f"{self.name}:{SHARED}", "--entrypoint", "bash", self.name)
        run("docker", *once, "-ec", fill, input=conf)
        for machine in PARTS:
            self._make(machine)
        self.wait_idle(len(NODES))

    def _make_network(self) -> None:
        """One whose addresses are known, for a machine keeps its own whatever happens to it. Docker chooses them."""
        for _ in range(5):
            run("docker", "network", "create", self.name)
            shown = run("docker", "network", "inspect", "-f", "{{(index .IPAM.Config 0).Subnet}}", self.name)
            run("docker", "network", "rm", self.name)
            subnet = shown.stdout.strip()
            if run("docker", "network", "create", "--subnet", subnet, self.name, check=False).returncode == 0:
                hosts = ipaddress.ip_network(subnet).hosts()
                next(hosts)  # the gateway's
                self.addresses = {machine: str(address) for machine, address in zip(PARTS, hosts, strict=False)}
                return
        pytest.fail("somebody else takes every network that Docker chooses")

    def _make(self, machine: str) -> None:
        options = ("--detach", "--hostname", machine, "--name", self.id(machine), "--shm-size", "1g")
        volume = ("--volume", f"{self.name}:{SHARED}", "--workdir", SHARED, "--env", f"TRAIN_RUNS={SHARED}/runs")
        # /etc/hosts knows all of them, whoever is there: Docker's own names go with a machine that is cut off or killed
        hosts = [f"--add-host={other}:{address}" for other, address in self.addresses.items()]
        network = ("--network", self.name, "--ip", self.addresses[machine])
        run("docker", "run", *options, *volume, *hosts, *network, self.name, PARTS[machine])

    def id(self, machine: str) -> str:
        return f"{self.name}-{machine}"

    def kill(self, machine: str) -> None:
        """Its power is gone."""
        run("docker", "kill", self.id(machine))

    def user(self, *command: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        """A command of a user's, on the login machine."""
        who = ("--interactive", "--user", "dev", "--env", "HOME=/home/dev", "--env", f"SLOW={SHARED}/slow")
        done = run("docker", "exec", *who, self.id("login"), *command, check=False, timeout=240, **options)
        if check and done.returncode:
            pytest.fail(f"{shlex.join(command)} exited {done.returncode}\n{done.stdout}\n{done.stderr}\n{self.logs()}")
        return done

    def read(self, path: str) -> str:
        """A file of the shared folder; '' where it is not there."""
        return self.user("cat", f"{SHARED}/{path}", check=False).stdout

    def record(self, name: str, node: int = 0) -> dict[str, Any]:
        """What a node keeps of a run; {}: nothing yet."""
        text = self.read(f"runs/{f'.nodes/{node}/' if node else ''}{name}/run.json")
        return dict(json.loads(text)) if text else {}

    def state(self, name: str) -> str:
        """That of the run's job; '': Slurm has none such any more."""
        job = f"{name}.{self.record(name)['submission']}"
        return self.user("squeue", "--noheader", f"--name={job}", "--format=%T", check=False).stdout.strip()

    def wait_idle(self, count: int) -> None:
        """Until so many nodes wait for work."""
        ask = ("sinfo", "--noheader", "--partition=low", "--format=%T %D", "--responding", "--states=idle")
        self.wait(f"{count} idle nodes", lambda: self.user(*ask, check=False).stdout.split() == ["idle", str(count)])

    def wait(self, what: str, true: Callable[[], object], seconds: float = 300) -> None:
        """Wait until something is true; else fail, with all that is known here."""
        try:
            eventually(what, true, seconds)
        except AssertionError as failure:
            pytest.fail(f"{failure}\n{self.logs()}")

    def logs(self) -> str:
        """The end of what all machines and runs have said, for messages of failed assertions."""
        said = [f"{machine}\n{_last(run('docker', 'logs', self.id(machine), check=False))}" for machine in PARTS]
        show = f"squeue; sinfo; tail -n 60 {SHARED}/runs/*/slurm-*.log; tail -n 5 {SHARED}/runs/*/run.json"
        return "\n".join([*said, _last(run("docker", "exec", self.id("login"), "bash", "-c", show, check=False))])

    def close(self) -> None:
        """Take away all of it, whatever has become of it."""
        gone = [("rm", "--force", "--volumes", *map(self.id, PARTS)), ("network", "rm", self.name)]
        gone += [("volume", "rm", self.name), ("image", "rm", self.name)]
        for command in gone:
            with contextlib.suppress(subprocess.TimeoutExpired):
                run("docker", *command, check=False)


def _last(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stdout + done.stderr)[-6000:]

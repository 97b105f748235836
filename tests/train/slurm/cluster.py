"""A real Slurm on this machine: a controller and two nodes, each a slurmd, out of Debian's packages, nothing installed.

The nodes are called by two addresses of the loopback, for the first one's name is where agents meet.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

import psutil

from tests.train.conftest import PATIENCE, Station
from tests.train.slurm.conf import slurm_conf
from tests.waiting import eventually

PACKAGES = (
    "slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge", "libmunge2", "libhwloc15",
    "liblua5.1-0",
)  # fmt: skip
NODES = ("127.0.0.1", "127.0.0.2")


def packages(folder: Path) -> Path:
    """Debian's packages, unpacked.

    Raises:
        LookupError: there is no archive of Debian's.
    """
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        raise LookupError("there is no package archive of Debian's to take Slurm from")
    for attempt in range(2):
        done = subprocess.run(["apt-get", "download", *PACKAGES], cwd=folder, capture_output=True, check=False)
        if done.returncode == 0:
            break
        if attempt:
            raise LookupError(done.stderr.decode())
        subprocess.run(["apt-get", "update"], capture_output=True, check=False)
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, folder], check=True)
    return folder


class Slurm:
    """Its daemons and commands.

    Args:
        root: where its packages were unpacked.
    """

    def __init__(self, root: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: a socket's name has little room
        (self._library,) = (root / "usr/lib").glob("*-linux-gnu")
        self._sbin, self._plugins = root / "usr/sbin", self._library / "slurm-wlm"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.bin = self.folder / "bin"
        for name in ("bin", "state", *NODES):
            (self.folder / name).mkdir()
        for tool in ("sbatch", "squeue", "scancel", "scontrol", "srun", "sinfo"):
            self._wrap(root / "usr/bin" / tool)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        low = _free_ports(3)
        host, user = socket.gethostname().partition(".")[0], getpass.getuser()
        conf = slurm_conf(
            f"{host}(127.0.0.1)", (user, user), str(self.folder),
            f"127.0.0.[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{low + 1}-{low + 2}]",
            f"{self.folder}/munge.socket",
            SlurmctldPort=low, PluginDir=self._plugins, FirstJobId=random.randrange(1, 9000),
        )  # fmt: skip
        (self.folder / "slurm.conf").write_text(conf)
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": f"{self.bin}:{os.environ['PATH']}"}

    def _wrap(self, program: Path) -> None:
        """A command that finds its libraries, and tells no job of them."""
        loader = next(Path("/lib64").glob("ld-linux*"), None) or next(Path("/lib").glob("ld-linux*"))
        command = f'exec {loader} --library-path {self._library}:{self._plugins} {program} "$@"'
        path = self.bin / program.name
        path.write_text(f"#!/bin/sh\n{command}\n")
        path.chmod(0o755)

    def start(self) -> None:
        """All of it; returns when jobs can run."""
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        words = [f"--{option}={self.folder}/munge.{name}" for option, name in files.items()]
        self._daemon("munged", "--foreground", "--force", *words)
        eventually("munged listens", (self.folder / "munge.socket").exists)
        self.start_controller()
        for node in NODES:
            self.start_node(node)
        self.wait_idle()

    def start_controller(self) -> None:
        self._daemon("slurmctld-wlm", "-D")

    def start_node(self, node: str) -> None:
        self._daemon("slurmd-wlm", "-D", "-N", node, "-d", str(self._sbin / "slurmstepd-wlm"), key=node)

    def _daemon(self, program: str, *arguments: str, key: str | None = None) -> None:
        log = (self.folder / f"{key or program}.out").open("ab")
        libraries = {"LD_LIBRARY_PATH": f"{self._library}:{self._plugins}"}
        self._daemons[key or program] = subprocess.Popen(
            [self._sbin / program, *arguments],
            env=os.environ | self.environment | libraries, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip

    def kill(self, key: str, whole: bool = False) -> None:
        """SIGKILL for a daemon: `slurmctld-wlm`, or a node. `whole`: for all that the node runs, too."""
        daemon = self._daemons.pop(key)
        below = psutil.Process(daemon.pid).children(recursive=True)
        if whole:
            below += [process for process in psutil.process_iter() if self._is_step_of(process, key)]
            below += [child for process in below for child in _below(process)]
        daemon.kill()
        daemon.wait()
        for process in below if whole else ():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _is_step_of(self, process: psutil.Process, node: str) -> bool:
        """Whether this is the slurmstepd of a job on that node: it serves a socket of the node's."""
        with contextlib.suppress(psutil.Error):
            if not process.name().startswith("slurmstepd"):
                return False
            return any(str(self.folder / node) in connection.laddr for connection in process.net_connections("unix"))
        return False

    def __call__(self, *command: str) -> str:
        """What a command of Slurm's says."""
        done = subprocess.run(
            command, env=os.environ | self.environment, capture_output=True, text=True, check=False, timeout=PATIENCE
        )
        assert done.returncode == 0, f"{command}: {done.stderr}{self.logs()}"
        return done.stdout

    def jobs(self) -> list[str]:
        """`JOB STATE` of all that it has."""
        return self("squeue", "--noheader", "--format=%i %T").split("\n")[:-1]

    def wait_idle(self) -> None:
        """Until every node waits for work."""

        def idle() -> bool:
            with contextlib.suppress(AssertionError):  # the controller does not answer yet
                return self("sinfo", "--noheader", "--partition=low", "--format=%D %T").split() == ["2", "idle"]
            return False

        eventually("two idle nodes", idle)

    def logs(self) -> str:
        """The end of what the daemons wrote, for messages of failed assertions."""
        return "\n".join(f"{path}\n{path.read_text(errors='replace')[-3000:]}" for path in self.folder.glob("*.log"))

    def close(self) -> None:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            for job in self.jobs():
                self("scancel", "--signal=KILL", "--full", job.split()[0])
                self("scancel", job.split()[0])
            eventually("no jobs", lambda: not self.jobs(), 30)
        for daemon in self._daemons.values():
            for process in [*_below(psutil.Process(daemon.pid)), psutil.Process(daemon.pid)]:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGKILL)
            daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def _below(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return list(process.children(recursive=True))
    return []


def _free_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    while True:
        first = random.randrange(30001, 32000)
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for port in range(first, first + count):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


class Login(Station):
    """A station with Slurm's commands."""

    def __init__(self, folder: Path, slurm: Slurm) -> None:
        super().__init__(folder)
        self.slurm = slurm
        self.slow = folder / "slow"
        """While this file is there, the steps of the task take their time."""

    def environment(self, command: str = "") -> dict[str, str]:
        return super().environment(command) | self.slurm.environment | {"SLOW": str(self.slow)}

    def node(self, number: int) -> Station:
        """The runs that a node keeps."""
        if number == 0:
            return self
        found = Station(self.folder)
        found.runs = self.runs / ".nodes" / str(number)
        return found

    def job(self, name: str) -> str:
        """The number of a run's job."""
        (job,) = self._jobs(name)
        return job[0]

    def states(self, name: str) -> list[str]:
        """The state of a run's jobs; []: Slurm has none such any more."""
        return [state for _, state in self._jobs(name)]

    def _jobs(self, name: str) -> list[list[str]]:
        found = self.slurm("squeue", "--noheader", "--format=%j %i %T").splitlines()
        return [line.split()[1:] for line in found if line.startswith(f"{name}.{self.record(name)['submission']} ")]

    def wait_gone(self, name: str) -> None:
        eventually(f"the end of {name}'s job", lambda: not self.states(name))

    def output(self, name: str) -> str:
        """What the batch script and the agents said, for messages of failed assertions."""
        files = sorted((self.runs / name).glob("slurm-*.log"))
        return "\n".join(path.read_text(errors="replace") for path in files) + self.logs(name)

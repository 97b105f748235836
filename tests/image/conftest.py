"""A station of its own for the tests: a copy of this checkout, on free ports, under a project name of its own.

The copy belongs to a user that exists nowhere else, as a person's checkout does, so that the tests see whose files
come out. Whatever station a person runs on the same machine is left alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.ports import free_port
from tests.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build" / "image-tests"  # what a person may want to look at afterwards: screenshots
OWNER = 4321
HANG = 300  # seconds after which nobody waits any longer; that much, because other tests load the machine meanwhile


def run(
    *command: str, check: bool = True, timeout: float = HANG, **options: object
) -> subprocess.CompletedProcess[str]:
    """Runs a command and returns it with its output as text; a failure shows that output."""
    if "input" not in options:
        options.setdefault("stdin", subprocess.DEVNULL)
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=timeout, **options)
    if check and done.returncode:
        pytest.fail(f"{shlex.join(command)} exited {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done


def base_image() -> str:
    """What the station's image is built on: the image that the Dockerfile names, or the one from Debian's archive."""
    named = re.search(r"^ARG BASE_IMAGE=(.+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert named
    here = run("docker", "image", "inspect", named[1], check=False).returncode == 0
    return named[1] if here else "trainstation-base:bookworm"


class Terminal:
    """A command on a terminal of its own, as in a person's window: typed into, read from, closed without a goodbye."""

    def __init__(self, *command: str, **options: object) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, **options
        )
        os.close(slave)
        os.set_blocking(self.master, False)
        self.seen = ""

    def read(self) -> str:
        with contextlib.suppress(BlockingIOError, OSError):
            while data := os.read(self.master, 65536):
                self.seen += data.decode(errors="replace")
        return self.seen

    def wait_for(self, text: str, seconds: float = HANG) -> None:
        eventually(f"{text!r} shows in the terminal, after {self.seen[-500:]!r}", lambda: text in self.read(), seconds)

    def type(self, line: str) -> None:
        os.write(self.master, f"{line}\n".encode())

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@dataclass
class Station:
    """A checkout and the station that runs from it."""

    folder: Path
    project: str
    settings: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.jupyter_port, self.ssh_port = free_port(), free_port()

    @property
    def env(self) -> dict[str, str]:
        # A home folder without ssh keys: the station makes a pair, as on a machine where nobody has one.
        return {
            **{k: v for k, v in os.environ.items() if not k.startswith(("TRAIN", "GPU", "MAKE", "ARGS", "MFLAGS"))},
            "COMPOSE_PROJECT_NAME": self.project,
            "JUPYTER_PORT": str(self.jupyter_port),
            "SSH_PORT": str(self.ssh_port),
            "GPUS": "none",
            "LEASES_DIR": str(self.folder.parent / "leases"),  # runs of other tests hold no cores of this station
            "STATION_BUILT": "trainstation:runtime",  # for docker compose alone
            "HOME": str(self.folder.parent),
            "DOCKER_CONFIG": str(Path.home() / ".docker"),
            **self.settings,
        }

    def make(self, *arguments: str, check: bool = True, timeout: float = 1500) -> subprocess.CompletedProcess[str]:
        return run("make", "-s", *arguments, cwd=self.folder, env=self.env, check=check, timeout=timeout)

    def compose(self, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
        files = ("-f", "docker-compose.yml", "-f", "docker-compose.cpu.yml")
        return run("docker", "compose", *files, *arguments, cwd=self.folder, env=self.env, **options)

    @property
    def container(self) -> str:
        return self.compose("ps", "--all", "--quiet", "station").stdout.strip()

    def inspect(self, template: str) -> str:
        return run("docker", "inspect", "-f", template, self.container).stdout.strip()

    def root(self, *command: str, **options: object) -> subprocess.CompletedProcess[str]:
        """Inside, as root, by docker exec."""
        return run("docker", "exec", self.container, *command, **options)

    def dev(self, *command: str, **options: object) -> subprocess.CompletedProcess[str]:
        """Inside, as dev, by docker exec."""
        who = ("--user", "dev", "--env", "HOME=/home/dev", "--workdir", "/workspace")
        return run("docker", "exec", *who, self.container, *command, **options)

    @property
    def ssh_words(self) -> list[str]:
        return shlex.split(self.make("ssh-command").stdout)

    def ssh(self, command: str, **options: object) -> subprocess.CompletedProcess[str]:
        return run(*self.ssh_words, command, **options)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.jupyter_port}"

    @property
    def token(self) -> str:
        return (self.folder / ".secrets" / "jupyter_token").read_text().strip()

    @property
    def log(self) -> str:
        done = run("docker", "logs", self.container)
        return done.stdout + done.stderr

    def healthy(self) -> bool:
        """As the engine has it, which looks every 15 seconds."""
        return self.inspect("{{.State.Health.Status}}") == "healthy"

    def health(self) -> str:
        """What is wrong at this moment, or `healthy`; nothing while the container starts."""
        return self.root("/usr/local/bin/station-health", check=False).stdout.strip()

    def wait_healthy(self) -> None:
        eventually("the station is healthy", lambda: self.health() == "healthy")

    def service_pid(self, name: str) -> int:
        return int(self.root("supervisorctl", "-c", "/etc/trainstation/supervisord.conf", "pid", name).stdout)

    def show(self, name: str) -> dict[str, object]:
        done = self.dev("train", "show", name, "--json", check=False)
        return json.loads(done.stdout) if done.returncode == 0 else {}


def copy_checkout(folder: Path, owner: int | None = OWNER) -> Path:
    """The files git knows or would take, as a fresh clone has them."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout
    for name in listed.decode().split("\0"):
        source, target = ROOT / name, folder / name
        if name and source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    if owner is not None and os.getuid() == 0:
        for path in [folder, *folder.rglob("*")]:
            os.chown(path, owner, owner, follow_symlinks=False)
    return folder


@pytest.fixture(scope="session")
def make_station(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Station]]:
    """Makes stations from fresh copies of the checkout, and takes away what they leave."""
    made: list[Station] = []

    def make(name: str, owner: int | None = OWNER, **settings: str) -> Station:
        folder = copy_checkout(tmp_path_factory.mktemp(name) / "trainstation", owner)
        made.append(Station(folder, f"station-test-{os.getpid()}-{name}", settings))
        return made[-1]

    yield make
    for station in made:
        station.compose("down", "--volumes", "--remove-orphans", "--timeout", "5", check=False, timeout=300)
        shutil.rmtree(station.folder.parent, ignore_errors=True)


@pytest.fixture(scope="session")
def station(make_station: Callable[..., Station]) -> Station:
    """The station most tests look at: built and started by `make up` on a fresh clone, without a GPU."""
    station = make_station("main")
    station.first_up = station.make("up")  # type: ignore[attr-defined]
    return station


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts what computes all the time behind what mostly waits: in CI, other tests compute meanwhile."""
    items.sort(key=lambda item: item.path.name == "test_inside.py")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """What the stations and the machine were doing when a test failed stands in its report."""
    report = yield
    if report.failed:
        for name in run("docker", "ps", "--all", "--format", "{{.Names}}", check=False).stdout.split():
            log = run("docker", "logs", "--tail", "25", name, check=False)
            health = run("docker", "inspect", "-f", "{{json .State}}", name, check=False)
            report.sections.append((f"{name}, the end of its log", f"{log.stdout}{log.stderr}{health.stdout[:3000]}"))
        memory = [line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith(("Mem", "Shmem:"))]
        load = f"{Path('/proc/loadavg').read_text()}{os.cpu_count()} cores; {'; '.join(memory)}"
        report.sections.append(("the machine", load))
    return report


@pytest.fixture(scope="session")
def kept() -> Path:
    KEPT.mkdir(parents=True, exist_ok=True)
    return KEPT


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=60_000)
    with sync_playwright() as playwright:
        # --no-sandbox: Chromium's sandbox refuses root, which is who tests in CI.
        yield playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"])


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page of a browser that has never been here: no cookie."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.set_default_timeout(60_000)
    yield page
    context.close()


@pytest.fixture
def endless_run(station: Station) -> Iterator[str]:
    """A training run, launched over ssh, that goes on until it is stopped."""
    name = f"endless-{time.monotonic_ns()}"
    station.ssh(f"train launch digits --name {name} --nproc 1 --epochs 100000 --log.every_steps 50")
    eventually("the run makes steps", lambda: int(station.show(name).get("step") or 0) > 0)
    yield name
    station.dev("train", "stop", name, "--now", check=False)


def steps_on(station: Station, name: str) -> None:
    """Passes when the run is alive and takes further steps."""
    before = metrics_lines(station, name)
    eventually(f"{name} takes further steps", lambda: metrics_lines(station, name) > before)


def metrics_lines(station: Station, name: str) -> int:
    path = station.folder / "runs" / name / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0

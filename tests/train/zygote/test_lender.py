"""A keeper, or else a launch, lends a zygote that has torch imported; processes that differ from it start their own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

import train
from tests.train.conftest import PATIENCE, lives
from tests.waiting import eventually
from train.zygote.server import lender_socket

if TYPE_CHECKING:
    from conftest import Station

pytestmark = pytest.mark.turns

ENDLESS = ["--steps", 10**6, "--cpu_threads", 1, "--log.tensorboard", "false"]
QUICK = ["--log.tensorboard", "false", "--cpu_threads", 1, "--steps", 3, "--nproc", 2]


class Warmth:
    """A keeper with its process, a station whose environment is its own, and a copy of the package that both use."""

    def __init__(self, station: Station, folder: Path) -> None:
        self.station, self.temporary = station, folder
        self.package = folder / "checkout" / "train"
        shutil.copytree(Path(train.__file__).parent, self.package, ignore=shutil.ignore_patterns("__pycache__"))
        self.extra = {"TMPDIR": str(folder), "PYTHONPATH": str(self.package.parent), "TRAIN_WARM": "on"}
        station.runs.mkdir()
        environment = station.environment() | self.extra
        command = [*launch_command(), "keeper"]
        self.keeper = subprocess.Popen(command, cwd=station.folder, env=environment, stderr=subprocess.DEVNULL)
        self.process = psutil.Process(self._wait())

    def _wait(self) -> int:
        """Until the process serves; its id."""
        deadline = time.monotonic() + PATIENCE
        while True:
            assert time.monotonic() < deadline and self.keeper.poll() is None
            if self.sockets() and answers(self.sockets()[0]):
                return psutil.Process(self.keeper.pid).children()[0].pid
            time.sleep(0.1)

    def sockets(self) -> list[Path]:
        return list((self.temporary / f"train-warm-{os.getuid()}").glob("*"))

    def launch(self, name: str, *more: object, env: dict[str, str] | None = None) -> None:
        self.station.ok("launch", "digits", "--name", name, *QUICK, *more, env=self.extra | (env or {}))

    def zygotes(self) -> list[psutil.Process]:
        """Those that the lender has forked."""
        return self.process.children()


def zygote_of(station: Station, name: str) -> psutil.Process:
    """The process that has forked the ranks of this run."""
    station.wait(name, lambda record: bool(record["pids"].get("ranks")), "its ranks")
    parent = psutil.Process(station.record(name)["pids"]["ranks"][0]).parent()
    assert parent is not None
    return parent


def launch_command() -> list[str]:
    return [sys.executable, "-m", "train"]


def answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        try:
            line.connect(str(path))
        except OSError:
            return False
    return True


@pytest.fixture(scope="module")
def warmth(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warmth]:
    from tests.train.conftest import Station

    folder = Path(tempfile.mkdtemp(prefix="warm-"))  # short: the name of a socket has little room
    station = Station(tmp_path_factory.mktemp("warm"))
    made = Warmth(station, folder)
    yield made
    station.close()
    made.keeper.kill()
    made.keeper.wait()
    shutil.rmtree(folder)


@pytest.mark.never_forgiven
@pytest.mark.minutes
def test_a_warm_run_ends_like_a_cold_one_to_the_last_bit(warmth: Warmth) -> None:
    warmth.launch("warm", "--follow")
    warmth.launch("cold", "--follow", env={"TRAIN_WARM": "off"})
    warm_, cold = warmth.station.record("warm"), warmth.station.record("cold")
    assert warm_["weights_sha256"] == cold["weights_sha256"] is not None


def test_ranks_of_launches_and_resumes_are_forked_by_what_was_lent(warmth: Warmth) -> None:
    warmth.launch("seen", "--steps", 10**6)
    for attempt in (1, 2):
        warmth.station.wait("seen", lambda record, n=attempt: len(record["attempts"]) == n and record["step"] >= 3)
        assert zygote_of(warmth.station, "seen").ppid() == warmth.process.pid
        warmth.station.ok("stop", "seen", env=warmth.extra)
        if attempt == 1:
            warmth.station.ok("resume", "seen", env=warmth.extra)


@pytest.mark.never_forgiven
def test_an_edited_package_is_what_a_warm_run_has(warmth: Warmth) -> None:
    file = warmth.package / "__init__.py"
    text = file.read_text()
    file.write_text(text.replace(f'"{train.__version__}"', '"7.7.7"'))
    try:
        warmth.launch("edited", "--steps", 10**6)
        assert zygote_of(warmth.station, "edited").ppid() == warmth.process.pid
        assert warmth.station.record("edited")["versions"]["train"] == "7.7.7"
    finally:
        file.write_text(text)
        warmth.station("stop", "edited", "--now", env=warmth.extra)


@pytest.mark.minutes
def test_who_differs_starts_cold(warmth: Warmth) -> None:
    warmth.launch("other", "--steps", 10**6, env={"OMP_NUM_THREADS": "3"})
    assert zygote_of(warmth.station, "other").ppid() != warmth.process.pid
    warmth.station("stop", "other", "--now", env=warmth.extra)


def test_a_refusal_reaches_the_one_who_asked(warmth: Warmth) -> None:
    done = warmth.station("launch", "digits", "--name", "no", "--batch_size", 1, "--nproc", 2, env=warmth.extra)
    assert done.returncode == 2 and "batch_size 1 is smaller" in done.stderr
    assert not (warmth.station.runs / "no").exists()


@pytest.mark.never_forgiven
def test_an_interrupted_warm_launch_leaves_nothing(warmth: Warmth) -> None:
    folder = warmth.station.folder
    (folder / "hangs.py").write_text("open('reached', 'w').close()\nimport time\ntime.sleep(600)\n")
    environment = warmth.station.environment() | warmth.extra
    process = subprocess.Popen(
        [*launch_command(), "launch", "hangs.py", "--name", "i"], cwd=folder, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    eventually("the launch has come that far", (folder / "reached").exists)
    assert warmth.zygotes()
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 130
    eventually("its zygote has ended", lambda: not warmth.zygotes())
    assert not (warmth.station.runs / "i").exists()


def test_a_warm_run_outlives_its_keeper(warmth: Warmth) -> None:
    warmth.launch("outlives", "--steps", 10**6)
    warmth.station.wait_for_step("outlives", 3)
    warmth.keeper.kill()
    warmth.keeper.wait()
    gone = time.monotonic() + 60
    while lives(warmth.process.pid):
        assert time.monotonic() < gone, "torch is held for nobody"
        time.sleep(0.05)
    step = warmth.station.record("outlives")["step"]
    warmth.station.wait_for_step("outlives", step + 5)
    warmth.station.ok("stop", "outlives", env=warmth.extra)
    assert len(warmth.station.record("outlives")["attempts"]) == 1


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "LD_PRELOAD", "PYTHONPATH", "MKL_CBWR", "TORCH_LOGS", "HOME"])
def test_variables_that_libraries_read_when_they_are_loaded_tell_processes_apart(name: str, tmp_path: Path) -> None:
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    place = lender_socket(environ, make=True)
    assert place is not None and place == lender_socket(environ | {"SOMETHING": "else"})
    assert place != lender_socket(environ | {name: "other"})


@pytest.mark.never_forgiven
def test_a_place_that_others_may_enter_is_not_used(tmp_path: Path) -> None:
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    assert lender_socket(environ) is None and list(tmp_path.iterdir()) == []  # looking for it makes nothing
    place = lender_socket(environ, make=True)
    assert place is not None and place.parent.stat().st_mode & 0o777 == 0o700
    place.parent.chmod(0o755)
    assert lender_socket(environ) is None
    place.parent.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    place.parent.symlink_to(tmp_path / "elsewhere")
    assert lender_socket(environ) is None


# --- without a keeper: the launch holds the lender, which imports while the launch reads its arguments


@pytest.fixture
def cold() -> Iterator[dict[str, str]]:
    """What makes a start cold, with a folder for temporary things of its own."""
    folder = tempfile.mkdtemp(prefix="ahead-")  # short: the name of a socket has little room
    yield {"TRAIN_WARM": "off", "TMPDIR": folder}
    shutil.rmtree(folder)


def waiting(folder: str) -> list[psutil.Process]:
    """Zygotes with a folder in this one that live and wait for an agent, or serve one."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        words, environ = process.info["cmdline"] or [], process.info["environ"] or {}
        if "train-zygote" in words and environ.get("TMPDIR") == folder and lives(process.pid):
            found.append(process)
    return found


def left_in(folder: str) -> list[Path]:
    """What lies in it but the folder of lenders' sockets."""
    return [path for path in Path(folder).rglob("*") if path.name != f"train-warm-{os.getuid()}"]


def test_a_refusal_ends_what_was_begun(station: Station, cold: dict[str, str]) -> None:
    done = station("launch", "digits", "--batch_size", "many", env=cold)
    assert done.returncode == 2 and "batch_size" in done.stderr
    eventually("it has ended, with its socket", lambda: not (waiting(cold["TMPDIR"]) or left_in(cold["TMPDIR"])))


@pytest.mark.never_forgiven
def test_it_ends_with_a_launch_that_is_killed(station: Station, cold: dict[str, str]) -> None:
    os.mkfifo(station.folder / "never.toml")
    command = [sys.executable, "-m", "train", "launch", "digits", "--config", "never.toml"]
    launch = subprocess.Popen(command, cwd=station.folder, env=station.environment() | cold)
    eventually("it is there", lambda: waiting(cold["TMPDIR"]) or launch.poll() is not None, every=0.02)
    assert launch.poll() is None
    launch.kill()
    launch.wait()
    eventually("it waits for no launch", lambda: not waiting(cold["TMPDIR"]))

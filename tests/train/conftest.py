"""What the tests of the package share: the command line as a user has it, and ways to look into run folders."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
import psutil
import pytest

from tests.train import forks
from train import cli
from train.build import cores
from train.launcher import tmux
from train.run import states
from train.run.run_folder import Run

pytest.register_assert_rewrite("tests.train.training")
# how long it takes to think of an example says how busy the machine is
hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("busy")

LOOKING = ("archive", "logs", "ls", "rm", "show")
"""Commands that start nothing and load no library: they run in the process of the tests, ten times as fast."""
PATIENCE = 240
"""Seconds after which a command that should have ended counts as hanging. Never a measure of speed."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell; what we start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Files side by side: by cores, and by memory, for each has runs of up to three ranks."""
    return max(1, min(int(cores.usable()), int(psutil.virtual_memory().total / 4e9), 8))


os.environ["TRAIN_STATE"] = tempfile.mkdtemp(prefix="train-state-")
"""Of the tests and of all that they start: a station's key of their own, never that of who runs them."""
atexit.register(shutil.rmtree, os.environ["TRAIN_STATE"], ignore_errors=True)


def lives(pid: int) -> bool:
    """Whether this process has not ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:  # it may go between two questions
        return False


@contextlib.contextmanager
def _unchanged_imports() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    try:
        yield
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if name.startswith("task_"):
                del sys.modules[name]


def command(*arguments: object) -> tuple[int, str, str]:
    """The command line in this process: honest where nothing is to be started, and quick."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _unchanged_imports():
        try:
            cli.main([str(argument) for argument in arguments])
        except SystemExit as end:
            out.seek(0)
            return int(end.code or 0), out.read(), err.getvalue()
    raise AssertionError("main returns by SystemExit only")


class Station:
    """A folder to work in, with its runs, and the command `train` in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        self.leases = Path(os.environ["TRAIN_STATE"]) / f"leases-{folder.name}"
        self.more: dict[str, str] = {}
        """Variables of all that is started here."""
        self.patience = PATIENCE
        """Seconds that a command may take."""

    def __call__(self, *arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run `train ARGUMENTS` to its end, without a terminal; in a new interpreter where variables ask for one."""
        if arguments[0] in LOOKING and env is None:
            return self.here(*map(str, arguments))
        texts, environment = [*map(str, arguments)], self.environment(str(arguments[0])) | (env or {})
        if forks.fits(env or {}):
            return forks.train(texts, self.folder, self.environment(), environment, self.patience)
        return subprocess.run(
            [sys.executable, "-m", "train", *texts],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=self.patience,
            check=False,
        )

    def here(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The same in this process: for a command that starts nothing, or is refused before it does."""
        with (
            contextlib.chdir(self.folder),
            mock.patch.dict(os.environ, self.environment(arguments[0]), clear=True),
        ):
            return subprocess.CompletedProcess(["train", *arguments], *command(*arguments))

    def ok(self, *arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """The same, and it must succeed."""
        done = self(*arguments, env=env)
        assert done.returncode == 0, f"train {' '.join(map(str, arguments))}\n{done.stdout}\n{done.stderr}"
        return done

    def start(self, *arguments: object, stdout: Any = subprocess.PIPE, stderr: Any = subprocess.STDOUT) -> Any:
        """Start `train ARGUMENTS` and go on. Returns the process, of text."""
        return subprocess.Popen(
            [sys.executable, "-m", "train", *map(str, arguments)],
            cwd=self.folder,
            env=self.environment(str(arguments[0])),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
        )

    def environment(self, command: str = "") -> dict[str, str]:
        """Of a process; where this command of `train` starts runs, they begin at once unless TRAIN_WARM=off is laid
        over it."""
        # of the tests' own surroundings, what would change how a run behaves is kept out, and what torch sets as it is
        # imported here: beside another environment no lender is found, and each command would import it anew
        others = ("TRAIN_", "TORCHELASTIC", "PYTEST_", "COLUMNS", "LINES", "TORCHINDUCTOR_", "TORCH_DISABLE_SHARE_")
        outer = {key: value for key, value in os.environ.items() if not key.startswith(others)}
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        # a keeper that lives here has nothing to do with tests
        own = {"PYTHONPATH": path, "TRAIN_STATE": os.environ["TRAIN_STATE"], "TRAIN_WARM": "off"}
        own |= {"TRAIN_LEASES": str(self.leases), **self.more}
        warm = forks.held_warm(outer | own) if command in ("fork", "keeper", "launch", "resume", "run", "sweep") else {}
        return outer | own | warm

    def run(self, name: str) -> Run:
        return Run(self.runs / name)

    def record(self, name: str) -> dict[str, Any]:
        """run.json as it stands on disk."""
        return self.run(name).read()

    def metrics(self, name: str) -> list[dict[str, Any]]:
        path = self.runs / name / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait(self, name: str, until: Callable[[dict[str, Any]], bool], what: str = "the state waited for") -> None:
        """Wait until a run's effective record is as wanted."""
        deadline = time.monotonic() + PATIENCE
        record: dict[str, Any] = {}
        while not ((self.runs / name / "run.json").exists() and until(record := self.run(name).read_effective())):
            assert time.monotonic() < deadline, f"{name} never reached {what}: {record}\n{self.logs(name)}"
            time.sleep(0.02)

    def wait_for_step(self, name: str, step: int) -> None:
        """Wait until a run is at least at this step."""
        self.wait(name, lambda record: record["step"] >= step, f"step {step}")

    def wait_for_end(self, name: str) -> dict[str, Any]:
        """Wait until no process of the run is alive; its effective record then."""
        self.wait(name, lambda record: record["state"] not in ("created", "queued", "running"), "its end")
        deadline = time.monotonic() + PATIENCE
        while self.run(name).alive():
            assert time.monotonic() < deadline, f"{name} never released its lock"
            time.sleep(0.02)
        return self.run(name).read_effective()

    def logs(self, name: str) -> str:
        """Everything the ranks wrote, for messages of failed assertions."""
        return "\n".join(
            f"{p}\n{p.read_text(errors='replace')}"
            for p in sorted((self.runs / name / "logs").rglob("*"))
            if p.is_file()
        )

    def samples(self, name: str) -> dict[int, list[int]]:
        """Data set indices by step, over all ranks, sorted: needs --log.samples true."""
        steps: dict[int, list[int]] = {}
        for path in (self.runs / name).glob("samples.rank*.log"):
            for line in path.read_text().splitlines():
                step, *ids = map(int, line.split())
                steps.setdefault(step, []).extend(ids)
        return {step: sorted(ids) for step, ids in sorted(steps.items())}

    def close(self) -> None:
        """End whatever still lives here."""
        subprocess.run(tmux.tmux(self.runs, "kill-server"), capture_output=True, check=False)
        for folder in self.runs.glob("*/run.json"):
            run = Run(folder.parent)
            if run.alive():
                run.ask_stop(states.NOW)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Undo changes of the environment, beside which no process would be lent, and fail if a worker is left.

    The test after it, in another file, would find both.
    """
    before = {**os.environ}
    yield
    for name in {*os.environ, *before} - {"PYTEST_CURRENT_TEST"}:
        if name not in before:
            del os.environ[name]
        elif os.environ.get(name) != before[name]:
            os.environ[name] = before[name]
    if multiprocessing.active_children():
        gc.collect()  # an iterator of torch in a cycle holds its workers until then
        left = multiprocessing.active_children()
        for child in left:
            child.kill()
            child.join()
        assert not left


@pytest.fixture
def station(tmp_path: Path) -> Iterator[Station]:
    """An empty folder for one test."""
    made = Station(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="session")
def shared_station(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Station]:
    """A folder whose runs several tests look at."""
    made = Station(tmp_path_factory.mktemp("shared"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def finished(shared_station: Station) -> Station:
    """The shared folder with `done` in it: a finished run of the digits in one process, for tests that only look."""
    shared_station.ok(
        "run", "digits", "--name", "done", "--epochs", 2, "--optim.lr", 0.1, "--log.samples", "true",
        "--checkpoint.every_steps", 20, "--cpu_threads", 1,
    )  # fmt: skip
    return shared_station


@pytest.fixture(scope="session")
def engine(shared_station: Station) -> Any:
    from tests.train.training import Engine  # torch, which most commands do without

    return Engine(shared_station)


@pytest.fixture(scope="session")
def steady(engine: Any) -> Any:
    """With the run `one` in it: the test task in float64 on one rank, ten steps, undisturbed."""
    assert engine.run("one", precision="fp64")["state"] == "finished"
    return engine

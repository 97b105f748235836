"""How many CPU threads a rank takes: what the user set, else as many as a micro batch has work for."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.train.tiers import later
from train.engine import threads

if TYPE_CHECKING:
    from conftest import Station

SHORT = ["--steps", 2, "--log.tensorboard", "false"]
CPU = torch.device("cpu")


def recorded(station: Station, name: str) -> int:
    return int(tomllib.loads((station.runs / name / "config.toml").read_text())["cpu_threads"])


@pytest.mark.minutes
def test_what_the_user_sets_wins_and_a_resume_keeps_it(station: Station) -> None:
    done = station.ok("run", "digits", "--name", "omp", *SHORT, env={"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "2"})
    assert recorded(station, "omp") == 3 and "3 CPU threads a rank (by OMP_NUM_THREADS)" in done.stderr
    station.ok("run", "digits", "--name", "flag", "--cpu_threads", 1, *SHORT, env={"OMP_NUM_THREADS": "3"})
    assert recorded(station, "flag") == 1
    station.ok("resume", "omp", "--steps", 4, "--follow", env={"OMP_NUM_THREADS": "1"})
    assert recorded(station, "omp") == 3
    station.ok("launch", "digits", "--name", "two", "--nproc", 2, "--follow", *SHORT, env={"MKL_NUM_THREADS": "2"})
    assert recorded(station, "two") == 2 and "by MKL_NUM_THREADS" in station.logs("two")


@pytest.mark.parametrize(
    ("omp", "mkl", "expected"),
    [("4", "2", (4, "OMP_NUM_THREADS")), ("4,2", None, (4, "OMP_NUM_THREADS")), (None, "2", (2, "MKL_NUM_THREADS")),
     ("many", "2", (2, "MKL_NUM_THREADS")), ("0", None, None), (None, None, None)],
)  # fmt: skip
def test_the_environment_is_read_as_torch_reads_it(
    monkeypatch: pytest.MonkeyPatch, omp: str | None, mkl: str | None, expected: tuple[int, str] | None
) -> None:
    for name, value in (("OMP_NUM_THREADS", omp), ("MKL_NUM_THREADS", mkl)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert threads.of_environment() == expected


@pytest.mark.minutes
@pytest.mark.parametrize("user", ["3", *later(None, "1")])
def test_the_one_that_torchrun_sets_is_not_the_users_wish(tmp_path: Path, user: str | None) -> None:
    code = "from train.engine import threads; open('said', 'a').write(f'{threads.of_environment()}\\n')"
    (tmp_path / "look.py").write_text(code)
    outer = {key: value for key, value in os.environ.items() if not key.endswith("_NUM_THREADS")}
    outer |= {"PYTHONPATH": str(Path(__file__).parents[3])} | ({"OMP_NUM_THREADS": user} if user else {})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "look.py"]
    subprocess.run(command, cwd=tmp_path, env=outer, check=True, timeout=240, capture_output=True)
    expected = (int(user), "OMP_NUM_THREADS") if user else None
    assert (tmp_path / "said").read_text() == f"{expected}\n" * 2


def choose(monkeypatch: pytest.MonkeyPatch, step: Callable[[], None], cores: int = 4) -> tuple[int, str]:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "share", lambda ranks: cores // ranks)
    return threads.choose(1, CPU, lambda: step)


def product(gflop: float) -> Callable[[], None]:
    """A step of so many operations: one product of matrices."""
    left, right = torch.ones(100, 1000), torch.ones(1000, int(gflop * 5000))
    return lambda: torch.mm(left, right).sum().item() and None


def test_a_thread_gets_a_gigaflop_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    for gflop, cores, expected in ((0.01, 4, 1), (1.9, 4, 1), (2.1, 4, 2), (3.5, 4, 3), (9, 4, 4), (9, 1, 1)):
        assert choose(monkeypatch, product(gflop), cores)[0] == expected


def test_the_number_depends_on_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launches of one request are compared bit for bit, and another number of threads gives other bits."""

    def slow() -> None:
        time.sleep(0.5)
        product(1.2)()

    assert choose(monkeypatch, slow) == choose(monkeypatch, product(1.2))


@pytest.mark.parametrize("what", ["hangs", "dies", "fails"])
def test_a_task_that_cannot_be_counted_gets_its_share_and_harms_nobody(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def step() -> None:
        {"hangs": lambda: time.sleep(10000), "dies": lambda: os._exit(9), "fails": lambda: int("x")}[what]()

    monkeypatch.setattr(threads, "_LIMIT", 1.0)
    threads_before, state = torch.get_num_threads(), torch.get_rng_state()
    assert choose(monkeypatch, step) == (4, "a fair share of the cores; what a micro batch takes could not be counted")
    assert torch.get_num_threads() == threads_before and torch.equal(torch.get_rng_state(), state)


@pytest.mark.minutes
def test_a_small_model_takes_one_thread(station: Station) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("there is one core only: nothing to choose")
    done = station.ok("run", "digits", "--name", "d", *SHORT, env={"OMP_NUM_THREADS": "", "MKL_NUM_THREADS": ""})
    assert "CPU thread a rank (a micro batch takes " in done.stderr, done.stderr
    assert recorded(station, "d") == 1

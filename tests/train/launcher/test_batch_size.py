"""`micro_batch_size auto`: halved until it fits in memory, by trying under a limit that is real."""

from __future__ import annotations

import resource
import subprocess
import sys
import tomllib
from typing import Any

import pytest

from tests.train.conftest import PATIENCE, Station
from train.launcher import batch_size

pytestmark = pytest.mark.turns

TASK = """
import os, signal
from dataclasses import dataclass
import torch
from torch import nn
from torch.utils.data import TensorDataset

@dataclass
class Settings:
    mebibytes: int = 64
    batchnorm: bool = False
    broken: bool = False
    killed_above: int = 1000

class Keep(torch.autograd.Function):
    # keeps so much a sample for the backward pass; nobody writes to it: what is limited is address space

    @staticmethod
    def forward(ctx, points, mebibytes):
        ctx.kept = torch.empty(len(points), mebibytes << 20, dtype=torch.uint8)
        return points.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None

class Net(nn.Module):
    def __init__(self, settings):
        super().__init__()
        self.mebibytes, self.killed_above = settings.mebibytes, settings.killed_above
        self.enter = nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(2) if settings.batchnorm else nn.Identity()

    def forward(self, points):
        return Keep.apply(self.norm(self.enter(points)), self.mebibytes)

def datasets(config):
    torch.manual_seed(1)
    Net.broken = config.task.broken
    return TensorDataset(torch.randn(40, 4), torch.randint(2, (40,))), None

def model(config):
    return Net(config.task)

def loss(model, batch):
    points, classes = batch
    if Net.broken:
        raise ValueError("on purpose")
    if len(points) > model.killed_above and model.training:
        os.kill(os.getpid(), signal.SIGKILL)
    return nn.functional.cross_entropy(model(points), classes)
"""


@pytest.mark.parametrize(
    ("said", "is_full"),
    [
        ("RuntimeError: NCCL Error 1: unhandled cuda error 'out of memory'", True),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        # cuDNN's engines whose workspace does not fit are passed over in silence
        ("RuntimeError: GET was unable to find an engine to execute this computation", True),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_a_full_gpu_is_known_by_what_libraries_say_of_it(said: str, is_full: bool) -> None:
    assert batch_size.is_full(said) is is_full


@pytest.fixture(scope="module")
def bare(shared_station: Station) -> int:
    """The address space of a rank that has only imported what it trains with."""
    code = "import train.trainer.setup; print(*[line for line in open('/proc/self/status') if 'VmPeak' in line])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=shared_station.environment(), capture_output=True, text=True, check=True
    )
    return int(done.stdout.split()[1]) << 10


@pytest.fixture
def auto(station: Station, bare: int) -> Any:
    """`train run ./task.py --micro_batch_size auto …` in a process that has so many bytes beside its imports."""
    (station.folder / "task.py").write_text(TASK)

    def call(*arguments: object, beside: int = 1200 << 20, size: object = "auto") -> subprocess.CompletedProcess[str]:
        limit = bare + beside
        return subprocess.run(
            [sys.executable, "-m", "train", "run", "./task.py", "--micro_batch_size", str(size), "--steps", "2",
             "--cpu_threads", "1", "--log.tensorboard", "false", *map(str, arguments)],
            cwd=station.folder, env=station.environment(), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=3 * PATIENCE, check=False,  # two processes import torch
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        )  # fmt: skip

    return call


def _size(station: Station, name: str) -> int:
    return int(tomllib.loads((station.runs / name / "config.toml").read_text())["micro_batch_size"])


def test_a_size_with_which_the_kernel_takes_a_rank_is_halved(station: Station) -> None:
    (station.folder / "task.py").write_text(TASK)
    few = ["--steps", 1, "--batch_size", 8, "--task.mebibytes", 1, "--task.killed_above", 5, "--device", "cpu"]
    done = station.ok("run", "./task.py", "--name", "a", "--micro_batch_size", "auto", *few)
    assert _size(station, "a") == 4 and "halved until it fits; 8 did not: a rank was killed" in done.stderr, done.stderr


@pytest.mark.minutes
def test_what_is_found_is_written_down_and_trains_under_the_limit_that_the_whole_batch_breaks(
    station: Station, auto: Any
) -> None:
    flags = ["--batch_size", 16, "--task.mebibytes", 200]
    done = auto("--name", "found", *flags)
    assert done.returncode == 0, done.stderr
    found = _size(station, "found")
    assert found in (2, 4, 8) and f"micro batches of {found} samples (halved until it fits" in done.stderr, done.stderr
    assert station.record("found")["state"] == "finished"
    whole = auto("--name", "whole", *flags, size=16)
    assert whole.returncode == 3 and "out of memory" in whole.stderr, whole.stderr


@pytest.mark.minutes
def test_a_searched_size_is_no_more_than_is_needed_and_trains_as_the_same_number_given(
    station: Station, auto: Any
) -> None:
    # three ranks of a batch of ten: four each at most, in micro batches of 4, 4 and 2; one sample is too few for it
    flags = ["--batch_size", 10, "--spawn", 3, "--task.mebibytes", 1, "--task.batchnorm", "true"]
    assert auto("--name", "searched", *flags).returncode == 0
    assert auto("--name", "given", *flags, size=4).returncode == 0
    assert _size(station, "searched") == 4
    assert station.record("searched")["weights_sha256"] == station.record("given")["weights_sha256"]


@pytest.mark.parametrize(
    ("flags", "beside", "words"),
    [
        (["--task.mebibytes", 4000], 700, ["not even 1 sample fits in memory", "allocate memory"]),
        (["--task.broken", "true"], 700, ["a step with micro batches of 8 failed", "task.py, line", "on purpose"]),
    ],
)
@pytest.mark.minutes
def test_where_none_fits_or_none_can_be_tried_it_is_refused_in_a_line(
    station: Station, auto: Any, flags: list[object], beside: int, words: list[str]
) -> None:
    done = auto("--name", "never", "--batch_size", 8, *flags, beside=beside << 20)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.count("\n") == 1 and all(word in done.stderr for word in words), done.stderr
    assert not station.runs.exists()

"""`micro_batch_size auto`: the largest micro batch that there is memory for, by trying under a limit that is real."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import time
import tomllib
from typing import Any

import pytest
import torch

from tests.train.conftest import PATIENCE, Station, lives
from train import config as configuration
from train.runs import fit, trial
from train.runs.memory import MARGIN, Room, Use
from train.runs.request import Request, resolve

TASK = """
from dataclasses import dataclass
import torch
from torch import nn
from torch.utils.data import TensorDataset

@dataclass
class Settings:
    mebibytes: int = 64
    batchnorm: bool = False
    broken: bool = False

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
        self.mebibytes = settings.mebibytes
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
    return nn.functional.cross_entropy(model(points), classes)
"""


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 64, 1000, 4097])
def test_the_search_finds_the_largest_and_tries_nothing_twice_as_large(count: int) -> None:
    for fitting in range(count + 1) if count < 100 else (0, 1, 2, 3, 511, 512, count - 1, count):
        tried: list[int] = []

        def fits(size: int, fitting: int = fitting, tried: list[int] = tried) -> bool:
            tried.append(size)
            return size <= fitting

        assert fit.largest(range(1, count + 1), fits) == (fitting or None)
        assert max(tried) <= max(2 * fitting, 2)
        assert len(tried) == len(set(tried)) <= 2 * count.bit_length() + 1


def test_the_search_takes_sizes_from_a_list() -> None:
    sizes = [1, 2, 4, 8, 20, 40]
    for fitting in (0, 1, 3, 8, 39, 100):
        wanted = max((size for size in sizes if size <= fitting), default=None)
        assert fit.largest(sizes, lambda size, fitting=fitting: size <= fitting) == wanted  # type: ignore[misc]


def test_what_a_size_will_need_lies_on_the_line_through_smaller_ones() -> None:
    known = {2: Use(120, 1020), 4: Use(140, 1040), 16: Use(300, 1300)}
    assert fit.expected(8, known) == Use(180, 1080)
    assert fit.expected(32, known) == Use(int(300 + 16 * 160 / 12), int(1300 + 16 * 260 / 12))
    assert fit.expected(4, known) is None
    assert fit.expected(8, {2: Use(200, 200), 4: Use(100, 210)}) == Use(100, 230)  # less for more is noise


@pytest.mark.parametrize(
    ("room", "margin", "holds"),
    [
        (Room(), 0.1, True),
        (Room(resident=1000), 0.1, True),
        (Room(resident=999), 0.1, False),
        (Room(resident=999), 0.0, True),
        (Room(address_space=2222), 0.1, False),
        (Room(address_space=2223), 0.1, True),
        (Room(resident=100, address_space=9999), 0.1, False),
    ],
)
def test_a_tenth_of_what_there_is_stays_free(room: Room, margin: float, holds: bool) -> None:
    assert room.holds(Use(900, 2000), margin) is holds


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
    assert trial._is_full(said) is is_full


@pytest.fixture(scope="module")
def bare(shared_station: Station) -> int:
    """The address space of a rank that has only imported what it trains with."""
    code = "import train.engine.setup; from train.runs import memory; print(memory.peaks().address_space)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=shared_station.environment(), capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.fixture
def auto(station: Station, bare: int) -> Any:
    """`train run ./task.py --micro_batch_size auto …` in a process that has so many bytes beside its imports."""
    (station.folder / "task.py").write_text(TASK)

    def call(*arguments: object, beside: int = 1200 << 20, size: object = "auto") -> subprocess.CompletedProcess[str]:
        limit = int((bare + beside) / (1 - MARGIN))
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


@pytest.mark.minutes
def test_what_is_found_is_written_down_and_trains_under_the_limit_that_the_whole_batch_breaks(
    station: Station, auto: Any
) -> None:
    flags = ["--batch_size", 16, "--task.mebibytes", 200]
    done = auto("--name", "found", *flags)
    assert done.returncode == 0, done.stderr
    found = _size(station, "found")
    assert 2 <= found < 16 and f"micro batches of {found} samples (the largest that fits" in done.stderr, done.stderr
    assert station.record("found")["state"] == "finished"
    whole = auto("--name", "whole", *flags, size=16)
    assert whole.returncode == 3 and "out of memory" in whole.stderr, whole.stderr
    for words in ("global batch 16 in micro batches of 16 on 1 rank, peak ", "would fit by estimate", "or auto"):
        assert words in whole.stderr, whole.stderr
    # of the limit the search leaves a tenth free, and it counts pages that are not touched: the estimate may be more
    estimate = int(re.findall(r"--micro_batch_size (\d+) in a new run", whole.stderr)[0])
    assert found / 2 <= estimate < 16


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
        (["--task.mebibytes", 4000], 700, ["not even 1 sample at a time fit", "ulimit -v"]),
        (["--task.broken", "true"], 700, ["a step with 2 samples at a time failed", "task.py, line", "on purpose"]),
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


def test_what_was_handed_over_is_what_is_tried(station: Station) -> None:
    (station.folder / "project").mkdir()
    (station.folder / "project" / "beside.py").write_text("MEBIBYTES = 1\n")
    original = station.folder / "project" / "own.py"
    original.write_text("raise SystemExit('edited since')\n")
    handed = station.folder / "handed"
    handed.mkdir()
    (handed / "task.py").write_text("from beside import MEBIBYTES\n" + TASK.replace("= 64", "= MEBIBYTES", 1))
    flags = {"micro_batch_size": "auto", "batch_size": "8", "steps": "1", "cpu_threads": "1", "device": "cpu"}
    (handed / "submission.json").write_text(json.dumps({
        "name": "a", "task": str(original), "task_copy": "task.py", "flags": flags, "config_file": None, "init": None,
        "cwd": str(station.folder), "nodes": 1, "nproc": 1, "wait_minutes": 1, "max_restarts": 0,
    }))  # fmt: skip
    (station.folder / "train.py").write_text("raise SystemExit('taken for the package')\n")
    placed = [sys.executable, "-P", "-m", "train.own", "train.runs.placed"]  # as on a node
    done = subprocess.run(
        [*placed, handed / "submission.json", "--runs", station.runs],
        cwd=station.folder, env=station.environment(), capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert tomllib.loads((station.runs / "a" / "config.toml").read_text())["micro_batch_size"] == 8


def test_a_server_that_a_task_starts_keeps_no_try_waiting_and_is_ended(station: Station) -> None:
    server = "import multiprocessing, os\nserver = multiprocessing.get_context('fork').Manager()\n"
    told = "if 'RANK' not in os.environ: open('servers', 'a').write(f'{server._process.pid}\\n')\n"
    (station.folder / "own.py").write_text(server + told + TASK)
    few = ["--steps", 1, "--batch_size", 4, "--cpu_threads", 1, "--device", "cpu", "--task.mebibytes", 1]
    process = station.start("launch", "own.py", "--name", "a", "--micro_batch_size", "auto", *few, "--follow")
    try:
        assert process.wait(90) == 0, process.stdout.read()
    finally:
        process.kill()
    servers = list(map(int, (station.folder / "servers").read_text().split()))
    deadline = time.monotonic() + 20
    while any(map(lives, servers)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert len(servers) >= 2  # of the check, and of the tries


def test_where_only_the_driver_can_count_gpus_it_is_not_asked_before_ranks_are_forked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a MIG slice, say. After that CUDA could be used in none of them."""

    def asked() -> int:
        raise AssertionError("the driver was opened in the process that forks ranks")

    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: -1)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", asked, raising=False)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # in this process it is not for others
    sizes: list[int] = []

    def fits(_: object, size: int) -> trial._Tried:
        sizes.append(size)
        return trial._Tried()

    monkeypatch.setattr(trial, "_try", fits)
    task, config = resolve(Request("digits", {"device": "cuda", "micro_batch_size": "8"}))
    order = {"task": "digits", "copy": None, "config": configuration.to_flat(config), "ranks": 1, "sizes": [1, 2, 4, 8]}
    assert trial._search(order)[0] == 8 and sizes == [2, 8] and task.name == "digits"

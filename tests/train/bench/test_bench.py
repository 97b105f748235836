"""The benches print their tables and leave nothing behind. What they measure is not judged here."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.ports import free_port
from tests.train.conftest import PATIENCE, Station
from train.bench.collective import KILOBYTES, bus_rate
from train.bench.compare import ratio


def table(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def test_checkpoint_compares_ways_to_save_with_torch_save_and_the_disk(station: Station) -> None:
    rows = table(station.ok("bench", "checkpoint", "--mb", 3, "--times", 2).stdout)
    assert [row[1] for row in rows[2:]] == [
        "dd conv=fsync", "torch.save", "DCP", "train, synchronous", "train, asynchronous",
    ]  # fmt: skip
    assert all(float(row[5]) > 0 for row in rows[2:])
    assert rows[3][3] == "1.00" and rows[2][6] == "1.00"
    assert os.listdir(station.runs) == []


def test_input_compares_the_task_images_with_torchvisions_reference(station: Station) -> None:
    text = station.ok("bench", "input", "--pictures", 8, "--times", 2).stdout
    rows = table(text)
    assert text.startswith("500 x 375 JPEG, ")
    assert [row[0] for row in rows[2:]] == ["torchvision's reference", "train: images"]
    assert rows[2][3] == "1.00" and all(float(row[1]) > 0 and float(row[2]) > 0 for row in rows[2:])
    assert os.listdir(station.runs) == []


def test_lr_draws_the_loss_over_the_rate_and_suggests_one_that_lowers_it(station: Station) -> None:
    flags = ("--times", 40, "--batch_size", 32, "--micro_batch_size", 16, "--cpu_threads", 1)
    text = station.ok("bench", "lr", "digits", "--to", "lr.png", *flags).stdout
    (rate,) = re.findall(r"the loss falls steepest at --optim.lr (\S+);", text)
    assert 1e-3 < float(rate) < 5
    assert (station.folder / "lr.png").stat().st_size > 10_000 and os.listdir(station.runs) == []


def test_one_that_is_terminated_leaves_nothing_behind(station: Station) -> None:
    bench = station.start("bench", "input", "--pictures", 8, "--times", 1_000_000)
    deadline = time.monotonic() + PATIENCE
    while not [*station.runs.glob(".bench-*/train/1/*")] and time.monotonic() < deadline:
        time.sleep(0.05)
    bench.terminate()
    assert bench.wait(PATIENCE) == 128 + signal.SIGTERM
    assert not station.runs.exists()


@pytest.mark.minutes
def test_collective_compares_all_reduce_by_size_with_a_copy_and_says_what_it_cannot_show(station: Station) -> None:
    text = station.ok("bench", "collective", "--nproc", 3, "--times", 2).stdout
    rows = table(text)
    assert [int(row[0]) for row in rows[2:]] == list(KILOBYTES)
    for size, milliseconds, bus, copy, share in rows[2:]:
        assert float(milliseconds) > 0 and float(copy) > 0
        # 3 ranks: each link carries four thirds of the tensor
        assert math.isclose(float(bus), 4 / 3 * int(size) * 1.024e-3 / float(milliseconds), rel_tol=0.1, abs_tol=0.006)
        assert math.isclose(float(share), float(bus) / float(copy), rel_tol=0.1, abs_tol=0.01)
    if torch.cuda.device_count() < 3:
        assert "Not shown: 3 ranks over NCCL" in text
    assert os.listdir(station.runs) == []


def test_the_rate_of_a_reduction_is_that_of_one_link() -> None:
    assert bus_rate(1000, 2, 1.0) == 1000 and bus_rate(1000, 4, 0.5) == 3000


def test_a_single_block_is_its_own_quartiles() -> None:
    assert ratio([1.0], [1.0]) == (1.0, "1.000 to 1.000")
    assert ratio([1.0, 4.0, 2.0], [1.0, 2.0, 2.0]) == (1.0, "1.000 to 2.000")


@pytest.mark.bench
def test_scaling_compares_strategies_with_a_hand_written_loop(station: Station) -> None:
    arguments = ["--strategies", "ddp,fsdp,hsdp", "--nproc", "2,3", "--times", 2, "--json"]
    found = json.loads(station.ok("bench", "scaling", *arguments).stdout)
    here = {(row["ranks"], row["way"]): row for row in found["rows"]}
    if not torch.cuda.device_count():
        ways = [(size, way) for size in (2, 3) for way in ("DDP by hand", "ddp", "fsdp", "hsdp")]
        assert list(here) == [(1, "a bare loop"), (1, "single"), *ways[:-1]]
        assert found["missing"][0].startswith("hsdp on 3 ranks")
        assert "DataParallel, because on a CPU it only calls the module" in found["missing"]
    first = here[1, "a bare loop"]["samples_per_s"]
    for (ranks, _), row in here.items():
        assert math.isclose(row["speed_up"], row["samples_per_s"] / first)
        assert math.isclose(row["efficiency"], row["speed_up"] / ranks)
        assert row["memory"] > 1e6 and row["by_hand"] > 0
        assert ranks == 1 or row["not_computing"] < 1
    assert os.listdir(station.runs) == []


@pytest.mark.bench
@pytest.mark.parametrize(
    "subject,line", [("scaling", "| 2 | DataParallel | needs GPUs |"), ("collective", "2 ranks on ")]
)
def test_torchruns_ranks_on_several_machines_measure_together(station: Station, subject: str, line: str) -> None:
    place = f"127.0.0.1:{free_port()}"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--rdzv-backend", "c10d"]
    command = [*torchrun, "--rdzv-endpoint", place, "-m", "train", "bench", subject, "--times", "1"]
    nodes = [
        subprocess.Popen(command, cwd=station.folder, env=station.environment(), stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    told = [node.communicate(timeout=PATIENCE)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    assert sorted(map(len, told))[0] == 0 and line in "".join(told)

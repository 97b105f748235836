"""The benches print their tables and leave nothing behind. What they measure is not judged here."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.ports import free_port
from tests.train.conftest import PATIENCE, Station
from train.bench import loop, recovery
from train.bench.collective import KILOBYTES, bus_rate
from train.bench.turns import ratio
from train.record.store import Run


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


@pytest.mark.bench
def test_resume_compares_the_begin_of_an_epoch_with_its_end(station: Station) -> None:
    rows = table(station.ok("bench", "resume", "--samples", 100_000, "--times", 1).stdout)
    assert [row[0] for row in rows[2:]] == ["1", "95"]
    assert all(float(row[2]) > 0 for row in rows[2:])
    assert os.listdir(station.runs) == []


@pytest.mark.minutes
def test_exporter_says_what_a_scrape_takes(station: Station) -> None:
    rows = table(station.ok("bench", "exporter", "--times", 1).stdout)
    assert [row[0] for row in rows[2:]] == [f"{n} {state}" for state in ("running", "finished") for n in (1, 10, 200)]
    assert all(int(row[5]) > 20 for row in rows[2:])
    assert os.listdir(station.runs) == []


@pytest.mark.bench
def test_start_compares_a_launch_a_death_and_a_resume_with_torchrun(station: Station) -> None:
    rows = table(station.ok("bench", "start", "--times", 1).stdout)
    ours = ["train launch", "a rank killed", "train resume"]
    ways = ["torchrun, bare DDP", *(f"{way}, cold" for way in ours), *(f"{way}, warm" for way in ours)]
    assert [row[0] for row in rows[2:]] == ways
    assert all(float(row[2]) > 0 and float(row[4]) > 0 and float(row[5]) > 100 for row in rows[2:])
    assert rows[2][6:] == ["1.00", "1.00", "1.00"]
    assert os.listdir(station.runs) == []


@pytest.mark.minutes
def test_stop_compares_the_flag_that_rides_along_with_plain_ddp(station: Station) -> None:
    rows = table(station.ok("bench", "stop", "--times", 2).stdout)
    assert [row[0] for row in rows[2:]] == ["plain DDP, no stop", "train: rides along", "a reduction of its own"]
    assert all(float(row[1]) > 0 for row in rows[2:])
    assert rows[2][2] == "1.000"
    assert os.listdir(station.runs) == []


def test_input_compares_the_task_images_with_torchvisions_reference(station: Station) -> None:
    text = station.ok("bench", "input", "--pictures", 8, "--times", 2).stdout
    rows = table(text)
    assert text.startswith("500 x 375 JPEG, ")
    assert [row[0] for row in rows[2:]] == ["torchvision's reference", "train: images"]
    assert rows[2][3] == "1.00" and all(float(row[1]) > 0 and float(row[2]) > 0 for row in rows[2:])
    assert os.listdir(station.runs) == []


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
def test_loop_compares_the_engine_with_loops_written_by_hand(station: Station) -> None:
    done = station.ok("bench", "loop", "--model", "resnet18", "--times", 1)
    rows = table(done.stdout)
    assert [row[0] for row in rows[2:5]] == ["a loop that indexes tensors", "a loop on DataLoader", "train"]
    assert all(float(row[1]) > 0 for row in rows[2:])
    assert rows[2][2] == "1.000" and rows[3][3] == "1.000"
    assert os.listdir(station.runs) == []


@pytest.mark.bench
def test_recovery_compares_a_death_with_plain_torchrun(station: Station) -> None:
    rows = table(station.ok("bench", "recovery", "--steps", 150, "--times", 1).stdout)
    ours, plain = rows[2], rows[3]
    assert [row[0] for row in (ours, plain)] == ["train launch", "torchrun, torch.save every 50 steps"]
    assert ours[1] == "1" and float(ours[2]) > 0
    assert (ours[5], ours[6], ours[8]) == ("0", "0", "1 of 1 equal")
    assert os.listdir(station.runs) == []


@pytest.mark.bench
def test_one_that_is_terminated_leaves_nothing_behind(station: Station) -> None:
    bench = station.start("bench", "recovery", "--steps", 100_000)
    deadline = time.monotonic() + PATIENCE
    while not [*station.runs.glob(".bench-*/*/metrics.jsonl")] and time.monotonic() < deadline:
        time.sleep(0.05)
    (run,) = (Run(path.parent) for path in station.runs.glob(".bench-*/*/run.json"))
    ranks = run.read()["pids"]["ranks"]
    bench.terminate()
    assert bench.wait(PATIENCE) == 128 + signal.SIGTERM
    assert len(ranks) == 2 and not any(map(psutil.pid_exists, ranks))
    assert not station.runs.exists()


class _Outlived:
    """A run of two processes: one that outlives the other ends the step it was in; others come after 0.4 s."""

    def __init__(self) -> None:
        self.began, self.was_ended, self.made = time.monotonic(), 0.0, 1
        self.processes = self._started()

    def _started(self) -> list[subprocess.Popen[bytes]]:
        return [subprocess.Popen(["sleep", "60"]) for _ in range(2)]

    def step(self) -> int:
        if time.monotonic() - self.began > 0.2 and self.made == 1 and not self.was_ended:
            self.made = 2
        if not self.was_ended and any(process.poll() is not None for process in self.processes):
            self.made, self.was_ended = 3, time.monotonic()
        elif self.made == 3 and time.monotonic() - self.was_ended > 0.4:
            self.end()
            self.processes, self.made = self._started(), 4
        elif self.made == 4 and time.monotonic() - self.was_ended > 0.6:
            self.made = 5
        return self.made

    def ranks(self) -> list[int]:
        return [process.pid for process in self.processes]

    def lives(self) -> bool:
        return self.made < 5

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def digest(self) -> str:
        return ""

    def twice(self) -> int:
        return 0


def test_the_step_that_a_rank_died_in_is_no_recovery() -> None:
    found = recovery.live(_Outlived(), [2], random.Random(0))
    assert len(found.recoveries) == 1 and found.recoveries[0] > 0.3
    assert (found.kills, found.hangs) == (1, 0)


@pytest.mark.bench
def test_the_engine_of_loop_has_memory_for_its_snapshots(tmp_path: Path) -> None:
    """Its table speaks of every default feature, and by default a launched run keeps its state in memory."""
    subject = loop.Subject("resnet18", 16, 4, 5, 2)
    cost = loop._cost(tmp_path, subject, loop.TRAIN, 0)
    said = Run(tmp_path / "turn-0").logs(1) / "rank0.log"
    assert "snapshots in memory: 2 x " in said.read_text() and len(cost.seconds) == 1


@pytest.mark.bench
def test_scaling_compares_strategies_with_a_hand_written_loop_and_draws_it(station: Station) -> None:
    picture = station.folder / "scaling.svg"
    arguments = ["--strategies", "dp,ddp,fsdp,hsdp", "--nproc", "2,3", "--times", 2, "--json", "--to", picture]
    found = json.loads(station.ok("bench", "scaling", *arguments).stdout)
    here = {(row["ranks"], row["way"]): row for row in found["rows"]}
    cpu = not torch.cuda.device_count()
    if cpu:
        several = [
            *((2, way) for way in ("DDP by hand", "ddp", "fsdp", "hsdp")),
            (3, "DDP by hand"),
            (3, "ddp"),
            (3, "fsdp"),
        ]
        assert list(here) == [(1, "a bare loop"), (1, "single"), *several]
        assert [what.split(",")[0] for what in found["missing"]][:3] == [
            "dp (nn.DataParallel) on 2", "dp (nn.DataParallel) on 3", "hsdp on 3 ranks",
        ]  # fmt: skip
    first = here[1, "a bare loop"]["samples_per_s"]
    for (ranks, _), row in here.items():
        assert math.isclose(row["speed_up"], row["samples_per_s"] / first)
        assert math.isclose(row["efficiency"], row["speed_up"] / ranks)
        assert row["memory"] > 1e6 and row["by_hand"] > 0
        assert ranks == 1 or row["not_computing"] < 1
    assert "<svg" in picture.read_text()
    assert os.listdir(station.runs) == []


@pytest.mark.bench
def test_scaling_over_two_nodes_shows_both_what_one_does_and_what_they_do_together(tmp_path: Path) -> None:
    nodes = []
    for node in range(2):
        (tmp_path / f"node{node}").mkdir()
        nodes.append(Station(tmp_path / f"node{node}"))
    cluster = ["--nnodes", 2, "--rendezvous", f"127.0.0.1:{free_port()}"]
    # node 0 says what is measured, the other one may know nothing of it
    other = nodes[1].start("bench", "scaling", *cluster, "--node-rank", 1)
    own = ["--strategies", "ddp,fsdp,hsdp", "--nproc", 2, "--times", 2, "--json", "--node-rank", 0]
    text = nodes[0].ok("bench", "scaling", *cluster, *own).stdout
    assert other.communicate(timeout=PATIENCE)[0] == text
    found = json.loads(text)
    here = {(row["machines"], row["ranks"], row["way"]): row for row in found["rows"]}
    assert list(here) == [
        (1, 1, "a bare loop"), (1, 1, "single"),
        *((1, 2, way) for way in ("DDP by hand", "ddp", "fsdp", "hsdp")),
        *((2, 4, way) for way in ("DDP by hand", "ddp", "fsdp", "hsdp")),
    ]  # fmt: skip
    first = here[1, 1, "a bare loop"]["samples_per_s"]
    for (_, ranks, _), row in here.items():
        assert math.isclose(row["efficiency"], row["samples_per_s"] / first / ranks)
        assert row["memory"] > 1e6 and (ranks == 1 or row["not_computing"] < 1)
    assert any("nodes are one machine" in line for line in found["missing"])
    assert all(os.listdir(node.runs) == [] for node in nodes)


def test_a_machine_that_never_comes_is_named(station: Station) -> None:
    place = f"127.0.0.1:{free_port()}"
    arguments = ("bench", "scaling", "--nnodes", 2, "--rendezvous", place, "--wait-minutes", 0.02, "--node-rank")
    for node, words in ((0, "node 1 of 2 never came"), (1, "node 0 of 2 never came")):
        done = station(*arguments, node)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr
        assert not station.runs.exists()

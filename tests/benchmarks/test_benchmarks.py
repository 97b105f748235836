"""Checks that each `python -m benchmarks.NAME` prints its table and leaves nothing. The figures are not judged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SESSIONS = ["a loop on DataLoader", "in a session", "in a session, log() at each step"]
OURS = ["train launch", "a rank killed", "train resume"]
STARTS = ["torchrun, bare DDP", *(f"{way}, {how}" for how in ("cold", "warm") for way in OURS)]
RUNS = [f"{count} {state}" for state in ("running", "finished") for count in (1, 10, 200)]


@pytest.mark.bench
@pytest.mark.parametrize(("name", "options", "first"), [
    ("exporter", ["--times", "1"], RUNS),
    ("launches", ["--steps", "20", "--times", "1"], ["a hand-written loop", "train"]),
    ("lengths", ["--samples", "96", "--times", "1"], ["random order", "lengths"]),
    ("listing", ["--times", "1"], ["1", "1000"]),
    ("loop", ["--model", "resnet18", "--times", "1"], ["a loop that indexes tensors", "a loop on DataLoader", "train"]),
    ("ordered", ["--times", "1"], ["1", "2", "3", "4"]),
    ("pages", ["--seconds", "3"], ["one page of 1000 runs", "10 pages of 1000 runs", "10 pages of a run that trains"]),
    ("recovery", ["--steps", "150", "--times", "1"], ["train launch", "torchrun, torch.save every 50 steps"]),
    ("resume", ["--samples", "100000", "--times", "1"], ["1", "95"]),
    ("session", ["--steps", "20", "--times", "1"], SESSIONS),
    ("start", ["--times", "1"], STARTS),
    ("stop", ["--times", "1"], ["plain DDP, no stop", "train: rides along", "a separate reduction"]),
    ("writing", ["--times", "1", "--megabytes", "64"], ["past the page cache", "ordinary writes, pages dropped"]),
])  # fmt: skip
def test_a_benchmark_prints_a_row_a_way(name: str, options: list[str], first: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--folder", str(tmp_path), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("|")]
    assert [row[0].strip() for row in rows[2:]][: len(first)] == first
    assert os.listdir(tmp_path) == []

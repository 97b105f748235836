"""`train bench checkpoint`: how long a checkpoint stalls training, and how fast it becomes durable.

The same state (parameters and momentum of one optimizer) is saved with torch.save, with plain
torch.distributed.checkpoint, and as a run does it. The ways take turns, several times in one process. `dd conv=fsync`
shows what the disk can do. All ways wait until a power cut could not take the checkpoint away.
"""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from ..checkpoint.save import Saver
from ..checkpoint.state_dict import TrainState, size_of, state_of
from ..config import Config
from ..parallel.devices import pick_device, take_device
from ..parallel.precision import Precision
from ..parallel.world import World
from ..run.durable import sync
from ..run.run_folder import Run


def bench(folder: Path, megabytes: list[int], times: int = 5, device: str = "cpu") -> str:
    """Measure in a folder on the disk with the runs, with a state on this device. Returns a table in Markdown."""
    place = pick_device(Config(device="cuda" if device == "cuda" else "cpu"), 1, 0)
    take_device(place)
    lines = [
        "| state | way | stall s | stall / torch.save | durable after s | MB/s | rate / dd |",
        "|---|---|---|---|---|---|---|",
    ]
    for size in megabytes:
        with tempfile.TemporaryDirectory(prefix=".bench-", dir=folder) as name:
            lines += _measure(Path(name), size, times, place)
    return "\n".join(lines)


Way = Callable[[], tuple[float, float]]
"""Saves once. Returns the seconds for which training would stop, and those until the state is durable."""


def _measure(folder: Path, megabytes: int, times: int, device: torch.device) -> list[str]:
    """Return the rows of the table."""
    module, optimizer = _state(megabytes, device)
    size = size_of(state_of(module, optimizer))
    ways = _ways(folder, module, optimizer, size)
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    time.sleep(0.1 + size / 2e9)  # the reservation of memory happens in the background, as it does in a run
    for _ in range(times):  # in turn, so that a slow moment of the disk meets all of them
        for way, measure in ways.items():
            found[way].append(measure())
    stalls = {way: statistics.median(stall for stall, _ in pairs) for way, pairs in found.items()}
    durable = {way: statistics.median(whole for _, whole in pairs) for way, pairs in found.items()}
    rows = []
    for way in ways:
        ratio = stalls[way] / stalls["torch.save"]
        stall = "-" if way.startswith("dd") else f"{stalls[way]:.3f}"
        share = "-" if way.startswith("dd") else f"{ratio:.2f}"
        rate, fraction = size / 1e6 / durable[way], durable["dd conv=fsync"] / durable[way]
        figures = [stall, share, f"{durable[way]:.2f}", f"{rate:.0f}", f"{fraction:.2f}"]
        rows.append("| " + " | ".join([f"{size / 1e6:.0f} MB", way, *figures]) + " |")
    return rows


def _state(megabytes: int, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make a model and an optimizer that has made a step: parameters and momentum are the two halves of the state."""
    # layers of 4 MB, as real models are made of many tensors
    module = nn.Sequential(*(nn.Linear(1024, 1023) for _ in range(max(1, round(megabytes / 2 / 4.19))))).to(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return module, optimizer


def _ways(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer, size: int) -> dict[str, Way]:
    """Return the ways to make the state durable, by name."""

    def with_torch_save() -> tuple[float, float]:
        begin, path = time.perf_counter(), folder / "state.pt"
        torch.save({"model": module.state_dict(), "optim": optimizer.state_dict()}, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        took = time.perf_counter() - begin
        path.unlink()
        return took, took

    def with_dcp() -> tuple[float, float]:
        begin, target = time.perf_counter(), folder / "dcp"
        dcp.save(state_of(module, optimizer), storage_writer=dcp.FileSystemWriter(target, sync_files=True))
        sync(target)
        took = time.perf_counter() - begin
        shutil.rmtree(target)
        return took, took

    def with_dd() -> tuple[float, float]:
        begin, path = time.perf_counter(), folder / "dd"
        count = max(1, size >> 20)
        command = ["dd", "if=/dev/zero", f"of={path}", "bs=1M", f"count={count}", "conv=fsync"]
        subprocess.run(command, check=True, capture_output=True)
        took = time.perf_counter() - begin
        path.unlink()
        return took, took

    return {
        "dd conv=fsync": with_dd,
        "torch.save": with_torch_save,
        "DCP": with_dcp,
        "train, synchronous": _ours(folder / "run", module, optimizer, asynchronous=False),
        "train, asynchronous": _ours(folder / "run", module, optimizer, asynchronous=True),
    }


def _ours(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer, asynchronous: bool) -> Way:
    run = Run(folder)
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    config = Config()
    config.checkpoint.asynchronous, config.checkpoint.keep = asynchronous, 1
    device = next(module.parameters()).device
    saver = Saver(run, World(0, size=1, local_rank=0, device=device), config=config, attempt=1, saved=lambda step: None)
    state = TrainState(module=module, optimizer=optimizer, precision=Precision("fp32", device))
    saver.prepare(state)
    steps = itertools.count(1 + asynchronous, 2)  # of the one way odd ones, of the other even ones

    def save() -> tuple[float, float]:
        begin = time.perf_counter()
        saver.save(next(steps), state, {})
        stall = time.perf_counter() - begin
        saver.wait()
        return stall, time.perf_counter() - begin

    return save

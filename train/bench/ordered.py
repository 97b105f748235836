"""`train bench ordered`: what it costs a step that gradients are added in one order.

The same model on the same ranks, with `parallel.reduce` fast and ordered, in turn block by block; two micro batches a
rank and step. The model is large enough that a gradient is a message of some size, and small enough for a CPU.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn.functional import cross_entropy

from train.config import Config, Parallel
from train.parallel.choose import make
from train.parallel.precision import Precision
from train.parallel.strategy import VOTES
from train.parallel.world import World, join, take_device

WORLDS = (1, 2, 3, 4)
MICROS = 2
"""Micro batches a rank and step."""
BATCH, WIDTH = 64, 512
"""Samples of a micro batch, units of a layer."""
STEPS = 10
"""Steps a block."""


def bench(folder: Path, times: int) -> str:
    """Measure with this many blocks of each way on 1, 2, 3 and 4 ranks. Returns a table in Markdown."""
    lines = ["| ranks | fast, ms a step | ordered, ms a step | ordered / fast | quartiles |", "|---|---|---|---|---|"]
    for size in WORLDS:
        with tempfile.TemporaryDirectory(prefix=".bench-", dir=folder) as name:
            torch.multiprocessing.spawn(_rank, (size, name, times), nprocs=size)
            blocks: dict[str, list[float]] = json.loads((Path(name) / "blocks.json").read_text())
        ratios = [one / other for one, other in zip(blocks["ordered"], blocks["fast"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        fast, ordered = (1000 * statistics.median(blocks[way]) / STEPS for way in ("fast", "ordered"))
        lines.append(f"| {size} | {fast:.2f} | {ordered:.2f} | {middle:.3f} | {low:.3f} to {high:.3f} |")
    return "\n".join(lines)


def _rank(rank: int, size: int, folder: str, times: int) -> None:
    torch.set_num_threads(1)
    device = take_device(Config(device="auto" if torch.cuda.device_count() >= size else "cpu"), size, rank)
    world = join(Config(), rank, size, rank, size, device, f"file://{folder}/store")
    steps = {"fast": _step(world, "fast"), "ordered": _step(world, "ordered")}
    blocks: dict[str, list[float]] = {way: [] for way in steps}
    for count in range(times + 2):
        for way, step in steps.items():
            world.barrier()
            began = time.perf_counter()
            for _ in range(STEPS):
                step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if count > 1:  # DDP lays out its buckets at first
                blocks[way].append(time.perf_counter() - began)
    if world.is_first:
        Path(folder, "blocks.json").write_text(json.dumps(blocks))
    if size > 1:
        world.barrier()
        dist.destroy_process_group()


def _step(world: World, reduce: str) -> Callable[[], None]:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)]
    images = torch.randn(BATCH, WIDTH).to(world.device)
    classes = torch.randint(10, (BATCH,)).to(world.device)
    parallel = Parallel(reduce="ordered" if reduce == "ordered" else "fast")
    spread = make(world, Config(parallel=parallel), Precision("fp32", world.device))
    model = spread.place(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    spread.start()
    micros = MICROS * world.size

    def step() -> None:
        votes = torch.zeros(len(VOTES), device=world.device)
        spread.begin(micros)
        for slot in range(MICROS):
            is_last = slot == MICROS - 1
            number = world.rank * MICROS + slot  # neighbours: what ordered takes; to fast it is all the same
            with spread.micro_batch(number, is_last):
                loss = cross_entropy(spread.call(images), classes)
                spread.backward(loss, 1 / micros, votes if is_last else None)
        spread.reduce(votes)
        spread.update(optimizer, None)

    return step

"""`python -m benchmarks.ordered`: what it costs a step to add gradients in one order.

The same model on the same ranks, with `parallel.reduce` fast and ordered, in turn block by block, with two micro
batches per rank and step. The model is large enough that a gradient is a message of some size, and small enough for a
CPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.multiprocessing
from torch import nn

from benchmarks import command
from train.bench.compare import measure, ratio
from train.bench.scaling import training_step
from train.config import Parallel
from train.parallel.precision import Precision
from train.parallel.world import World

WORLDS = (1, 2, 3, 4)
MICROS = 2
"""Number of micro batches per rank and step."""
BATCH, WIDTH = 64, 512
"""Number of samples of a micro batch, and of units of a layer."""
STEPS = 10
"""Number of steps per block."""


def bench(folder: Path, times: int) -> str:
    """Measure with this many blocks of each way on 1, 2, 3 and 4 ranks. Returns a table in Markdown."""
    lines = ["| ranks | fast, ms a step | ordered, ms a step | ordered / fast | quartiles |", "|---|---|---|---|---|"]
    for size in WORLDS:
        blocks = measure(folder, size, {"fast": _fast, "ordered": _ordered}, STEPS, times)
        middle, quartiles = ratio(blocks["ordered"], blocks["fast"])
        fast, ordered = (1000 * statistics.median(blocks[way]) / STEPS for way in ("fast", "ordered"))
        lines.append(f"| {size} | {fast:.2f} | {ordered:.2f} | {middle:.3f} | {quartiles} |")
    return "\n".join(lines)


def _fast(world: World) -> Callable[[], None]:
    return _step(world, Parallel(reduce="fast"))


def _ordered(world: World) -> Callable[[], None]:
    return _step(world, Parallel(reduce="ordered"))


def _step(world: World, parallel: Parallel) -> Callable[[], None]:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)]
    samples = torch.randn(BATCH, WIDTH).to(world.device), torch.randint(10, (BATCH,)).to(world.device)
    precision = Precision("fp32", world.device)
    return training_step(world, parallel, nn.Sequential(*layers), samples, precision, MICROS)


if __name__ == "__main__":
    command.run(bench, times=30)

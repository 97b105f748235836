"""`python -m benchmarks.stop`: what it costs a step that all ranks agree whether a stop was requested.

Three ways to train the same small model on the same ranks: plain DDP, which agrees on nothing; the engine, where the
flag (and the loss, and whether to save) is part of the reduction of the gradients; and hand-written DDP with a separate
reduction for the flag. The model is small, because there the cost of a message shows most.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.multiprocessing
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from benchmarks import command
from train.bench.compare import measure, ratio
from train.config import Config
from train.parallel.choose import make
from train.parallel.ddp import NO_BUFFER_BROADCAST
from train.parallel.precision import Precision
from train.parallel.strategy import STEP_STATS
from train.parallel.world import World
from train.trainer.step_stats import STOP, Readback, StepResult

RANKS = 2
STEPS = 50
"""Number of steps per block. The ways take turns block by block, so that a slow moment meets all of them."""


def bench(folder: Path, times: int) -> str:
    """Measure with this many blocks of each way. Returns a table in Markdown."""
    ways = {"plain DDP, no stop": _ddp, "train: rides along": _riding, "a separate reduction": _own}
    blocks = measure(folder, RANKS, ways, STEPS, times)
    lines = ["| way | ms a step | / plain DDP | quartiles |", "|---|---|---|---|"]
    for way, seconds in blocks.items():
        middle, quartiles = ratio(seconds, blocks["plain DDP, no stop"])
        milliseconds = 1000 * statistics.median(seconds) / STEPS
        lines.append(f"| {way} | {milliseconds:.3f} | {middle:.3f} | {quartiles} |")
    return "\n".join(lines)


def _parts(world: World) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    return model.to(world.device), torch.randn(32, 64).to(world.device), torch.randint(10, (32,)).to(world.device)


def _ddp(world: World) -> Callable[[], None]:
    model, images, classes = _parts(world)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True, **NO_BUFFER_BROADCAST)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        cross_entropy(parallel(images), classes).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _own(world: World) -> Callable[[], None]:
    step = _ddp(world)

    def step_and_ask() -> None:
        step()
        world.any(False)

    return step_and_ask


def _riding(world: World) -> Callable[[], None]:
    model, images, classes = _parts(world)
    strategy = make(world, Config(), Precision("fp32", world.device))
    strategy.place(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    strategy.start()
    readback = Readback[None](world.device)

    def step() -> None:
        stats = torch.zeros(len(STEP_STATS), device=world.device)
        with strategy.micro_batch(0, is_last=True):
            strategy.backward(strategy.compute(lambda model: cross_entropy(model(images), classes)), 1 / RANKS, stats)
        sums = strategy.reduce(stats)
        strategy.scale_and_clip_gradients(optimizer, clip_norm=None)
        strategy.update(optimizer)
        readback.put(None, StepResult({"": sums}, {}, []))
        for _, values, _ in readback.take(everything=False):
            assert not values[""][STOP]

    return step


if __name__ == "__main__":
    command.run(bench, times=200)

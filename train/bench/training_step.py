"""A step as the engine makes it, of any strategy: with statistics of the step, and buffers that ranks agree on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from train.config import Config, Parallel
from train.parallel.choose import make
from train.parallel.precision import Precision
from train.parallel.strategy import STEP_STATS
from train.parallel.world import World


def training_step(
    world: World,
    parallel: Parallel,
    network: nn.Module,
    samples: tuple[Tensor, Tensor],
    precision: Precision,
    micros: int = 1,
) -> Callable[[], None]:
    """What makes a step of SGD on this rank.

    Args:
        samples: inputs and classes of every micro batch.
        micros: micro batches a rank and step.
    """
    spread = make(world, Config(parallel=parallel), precision)
    model = spread.place(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    spread.start()
    inputs, classes = samples
    total = micros * world.size

    def step() -> None:
        stats = torch.zeros(len(STEP_STATS), device=world.device)
        spread.begin(total)
        for slot in range(micros):
            is_last = slot == micros - 1
            number = world.rank * micros + slot  # neighbours: what ordered sums take; else it is all the same
            with spread.micro_batch(number, is_last):
                with precision.autocast():
                    loss = spread.compute(lambda model: cross_entropy(model(inputs), classes))
                spread.backward(loss, 1 / total, stats if is_last else None)
        spread.reduce(stats)
        spread.scale_and_clip_gradients(optimizer, None)
        spread.update(optimizer)

    return step

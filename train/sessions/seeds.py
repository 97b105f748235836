"""What a session seeds, and when. No generator's state is saved, so every draw must follow a seed that is a function.

| where | the seed is made from | on the ranks |
|---|---|---|
| the session opens | seed | alike |
| objects are registered | seed | alike |
| an epoch begins | seed, epoch | alike |
| a batch is fetched | seed, epoch, step, rank (data/plan.py) | different |
| a batch is computed | seed, step, rank | different |
| a pass over the loader ends | seed, epoch, rank | different |

A step is a batch, counted over all epochs from 0. A batch is computed after the next line of this table: iter() of a
DataLoader draws a number itself, so seeds from before it would differ after a resume.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch

from ..data.order import seed_of
from ..data.seeding import Seed, seed_host, seed_owned

_TORCH = 2**63 - 1
"""The largest seed that torch takes."""


def have_drawn() -> bool:
    """Whether something was drawn from torch's generator since it was seeded, for example the weights of a model."""
    unused = torch.Generator().manual_seed(torch.initial_seed())
    return not torch.equal(unused.get_state(), torch.default_generator.get_state())


def at_start(seed: int) -> None:
    """Seed Python, NumPy and torch as scripts do themselves, so that data and first weights are the same on all ranks
    and in every attempt."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)  # devices too, also those that are used later


def after_register(seed: int, own: Sequence[Seed] = ()) -> None:
    """Seed again after a checkpoint was loaded, or not."""
    _seed(seed_of(seed, "registered"), own)


def begin_epoch(seed: int, epoch: int, own: Sequence[Seed] = ()) -> None:
    """Seed what stands between the head of an epoch and its first batch."""
    _seed(seed_of(seed, "epoch", epoch), own)


def before_step(seed: int, step: int, rank: int, own: Sequence[Seed] = ()) -> None:
    """Seed the body of a batch, after the batch was fetched.

    Args:
        own: generators that the registered objects hold.
    """
    _seed(seed_of(seed, "step", step, rank), own)


def after_pass(seed: int, epoch: int, rank: int, own: Sequence[Seed] = ()) -> None:
    """Seed the work at the end of an epoch: a resume can begin there."""
    _seed(seed_of(seed, "end", epoch, rank), own)


def on_devices(seed: int) -> None:
    """Seed the generator of every GPU. There are none before CUDA is used. Writes numbers of the host only."""
    for generator in torch.cuda.default_generators:
        generator.manual_seed(seed & _TORCH)


def _seed(seed: int, own: Sequence[Seed]) -> None:
    seed_host(seed)
    on_devices(seed)
    if own:
        seed_owned(own, seed)

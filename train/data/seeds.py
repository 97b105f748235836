"""Seeding the generators that fetching and computing draw from."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch

from train.data.generators import Seed, seed_owned
from train.data.order import seed_of


def seed_host(seed: int) -> None:
    """Seed Python's, NumPy's and torch's CPU generators."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed & (2**63 - 1))


def seed_compute(seed: int, device: torch.device, tag: str = "compute", own: Sequence[Seed] = ()) -> None:
    """Seed every generator that a forward pass may draw from, apart from those of fetching.

    Args:
        tag: what is computed.
        own: generators of the task's own, see generators.py.
    """
    seed = seed_of(seed, tag)
    seed_host(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed & (2**63 - 1))
    if own:
        seed_owned(own, seed)

"""Seeding the generators that fetching and computing draw from."""

from __future__ import annotations

import random

import numpy as np
import torch

from train.data.order import seed_of


def seed_host(seed: int) -> None:
    """Seed Python's, NumPy's and torch's CPU generators."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed & (2**63 - 1))


def seed_compute(seed: int, device: torch.device, tag: str = "compute") -> None:
    """Seed every generator that a forward pass may draw from, apart from those of fetching.

    Args:
        tag: what is computed.
    """
    seed = seed_of(seed, tag)
    seed_host(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed & (2**63 - 1))

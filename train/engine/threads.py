"""CPU threads and loader processes of a rank, where the user has set none.

Another number of threads gives other bits, so it depends on nothing that varies from launch to launch, and the number
is recorded in the run's configuration.
"""

from __future__ import annotations

import os

import torch

from train import cores

SMALL = 100_000
"""Parameters of a model that computes on one thread: several would wait for each other longer than they work."""
_MOST_LOADERS = 8
"""Loader processes that a rank takes by itself: each holds some batches in shared memory."""


def share(ranks: int) -> int:
    """The cores that this process may use, over the ranks; at least 1."""
    return max(1, int(cores.usable() // ranks))


def loaders(ranks: int, device: torch.device, is_indexed_at_once: bool) -> int:
    """Loader processes of a rank, where the user set none.

    Args:
        is_indexed_at_once: whether a batch is one indexing of tensors, which costs less than another process.
    """
    if device.type == "cpu" or is_indexed_at_once:
        return 0
    return min(max(share(ranks) - 1, 1), _MOST_LOADERS)


def choose(ranks: int, device: torch.device, model: torch.nn.Module) -> tuple[int, str]:
    """Threads of a rank, and why: by OMP_NUM_THREADS, else 1 for a small model, else its share of the cores."""
    wish = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if wish.isdecimal() and 1 <= int(wish) <= 4096:
        return int(wish), "by OMP_NUM_THREADS"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if device.type == "cpu" and parameters < SMALL:
        return 1, f"the model has {parameters:,} parameters; from {SMALL:,} on it would be a share of the cores"
    return share(ranks), "a fair share of the cores"

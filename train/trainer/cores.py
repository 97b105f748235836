"""CPU cores: how many a process may use, and how many threads and loader processes a rank takes of them by default.

A run's configuration records both numbers, so that no result depends on what varies from launch to launch.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from train.errors import shortened

if TYPE_CHECKING:
    import torch
    from torch import nn

_SMALL = 100_000
"""Parameters of a model that computes on one thread: several would wait for each other longer than they work."""
_MOST_LOADERS = 8
"""Loader processes that a rank takes by default: each holds some batches in shared memory."""


def usable(root: Path = Path("/")) -> float:
    """Cores by affinity and by the control group's quota (version 2); may be less than one.

    Args:
        root: the folder under which /sys is found.
    """
    cores = float(len(os.sched_getaffinity(0)))
    with contextlib.suppress(OSError, ValueError):
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()  # "max 100000"
        if int(quota) > 0 and int(period) > 0:
            cores = min(cores, int(quota) / int(period))
    return cores


def per_rank(ranks: int) -> int:
    """The cores that this process may use, over the ranks; at least 1."""
    return max(1, int(usable() // ranks))


def default_loaders(ranks: int, device: torch.device, is_indexed_at_once: bool) -> int:
    """Loader processes of a rank, where the user set none.

    Args:
        is_indexed_at_once: whether a batch is one indexing of tensors, which costs less than another process.
    """
    if device.type == "cpu" or is_indexed_at_once:
        return 0
    return min(max(per_rank(ranks) - 1, 1), _MOST_LOADERS)


def default_threads(ranks: int, device: torch.device, model: nn.Module) -> tuple[int, str]:
    """Threads of a rank, and why: by OMP_NUM_THREADS, else 1 for a small model, else its share of the cores."""
    wish = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if wish.isdecimal() and 1 <= int(wish) <= 4096:
        return int(wish), "by OMP_NUM_THREADS"
    ignored = f"; OMP_NUM_THREADS={shortened(wish, 40)} is no number from 1 to 4096, and not used" if wish else ""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if device.type == "cpu" and parameters < _SMALL:
        share = f"from {_SMALL:,} on it would be a share of the cores"
        return 1, f"the model has {parameters:,} parameters; {share}{ignored}"
    return per_rank(ranks), f"a fair share of the cores{ignored}"

"""CPU cores: how many a process may use, and how many threads and data workers a rank uses by default.

The run's configuration records both numbers, so that every launch computes the same result.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import shortened

if TYPE_CHECKING:
    import torch
    from torch import nn

_SMALL = 100_000
"""Number of parameters below which a model computes on one thread: several would mostly wait for each other."""
_MOST_LOADERS = 8
"""Maximum number of data workers per rank by default: each holds some batches in shared memory."""


def usable(root: Path = Path("/")) -> float:
    """Return the cores that affinity and the control group's quota allow; may be less than one.

    Args:
        root: the folder under which /sys is found.
    """
    cores = float(len(os.sched_getaffinity(0)))
    with contextlib.suppress(OSError, ValueError):
        quota, period = _quota(root / "sys/fs/cgroup")
        if int(quota) > 0 and int(period) > 0:
            cores = min(cores, int(quota) / int(period))
    return cores


def _quota(folder: Path) -> tuple[str, str]:
    """Return the microseconds of processor time per period, and the period, by cgroup version 2 or 1."""
    if (folder / "cpu.max").exists():
        quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()  # "max 100000"
        return quota, period
    names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")  # -1: none
    quota, period = ((folder / "cpu" / name).read_text(encoding="ascii").strip() for name in names)
    return quota, period


def per_rank(ranks: int) -> int:
    """Return the usable cores divided by the ranks; at least 1."""
    return max(1, int(usable() // ranks))


def default_loaders(ranks: int, device: torch.device, is_indexed_at_once: bool) -> int:
    """Return the number of data workers per rank for a user who set none.

    Args:
        is_indexed_at_once: whether a batch is one indexing of tensors, which costs less than another process.
    """
    if device.type == "cpu" or is_indexed_at_once:
        return 0
    return min(max(per_rank(ranks) - 1, 1), _MOST_LOADERS)


def default_threads(ranks: int, device: torch.device, model: nn.Module) -> tuple[int, str]:
    """Return the threads of a rank and the reason: OMP_NUM_THREADS, else 1 for a small model, else a share of the
    cores."""
    wish = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if wish.isdecimal() and 1 <= int(wish) <= 4096:
        return int(wish), "by OMP_NUM_THREADS"
    ignored = (
        f"; OMP_NUM_THREADS={shortened(wish, 40)} is ignored, because it is not a number from 1 to 4096" if wish else ""
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if device.type == "cpu" and parameters < _SMALL:
        share = f"from {_SMALL:,} parameters on it would be a share of the cores"
        return 1, f"the model has {parameters:,} parameters; {share}{ignored}"
    return per_rank(ranks), f"a fair share of the cores{ignored}"

"""Cores that this process may use. The standard library alone."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


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

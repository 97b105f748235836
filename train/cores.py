"""Cores that this process may use. The standard library alone."""

from __future__ import annotations

import os
from pathlib import Path

_GROUPS = Path("sys/fs/cgroup")


def usable(root: Path = Path("/")) -> float:
    """By affinity and by the control group's quota (version 2); may be less than one.

    Args:
        root: the folder under which /sys is found.
    """
    groups, cores = root / _GROUPS, float(len(os.sched_getaffinity(0)))
    quota = _words(groups / "cpu.max")  # "max 100000" or "200000 100000"
    if len(quota) == 2 and all(word.isdigit() and int(word) > 0 for word in quota):
        cores = min(cores, int(quota[0]) / int(quota[1]))
    return cores


def _words(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return []

"""How many cores a process may use."""

from __future__ import annotations

import os
from pathlib import Path

from train.build import cores


def test_a_quota_of_the_control_group_counts(tmp_path: Path) -> None:
    quota = tmp_path / "sys/fs/cgroup/cpu.max"
    quota.parent.mkdir(parents=True)
    mine = len(os.sched_getaffinity(0))
    for text, usable in (("50000 100000", 0.5), ("max 100000", mine), ("garbage", mine)):
        quota.write_text(text)
        assert cores.usable(tmp_path) == usable
    quota.unlink()  # version 1
    (quota.parent / "cpu").mkdir()
    (quota.parent / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    for text, usable in (("50000\n", 0.5), ("-1\n", mine)):
        (quota.parent / "cpu" / "cpu.cfs_quota_us").write_text(text)
        assert cores.usable(tmp_path) == usable

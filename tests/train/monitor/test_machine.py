"""This machine within the limits of its container."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from train.build import cores
from train.monitor.machine import Machine


def test_memory_disk_and_cores_are_those_that_this_process_may_use(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "not" / "there")
    first = machine.facts()
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        pass
    second = machine.facts()
    assert first["busy"] is None and second["cores"] == cores.usable()
    assert second["busy"] is None or second["busy"] > 0
    assert 0 < (second["memory_used"] or 0) < (second["memory"] or 0) <= psutil.virtual_memory().total
    assert 0 < (second["disk_free"] or 0) <= (second["disk"] or 0)

"""Waiting in tests, for something that comes by itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

PATIENCE = 300.0
"""Seconds after which what should have come hangs: others load the machine. Never a measure of speed."""


def eventually(what: str, is_true: Callable[[], Any], seconds: float = PATIENCE, every: float = 0.1) -> Any:
    """Waits until `is_true()` gives something true, and returns it; else the test fails with `what`."""
    deadline = time.monotonic() + seconds
    while not (value := is_true()):
        if time.monotonic() > deadline:
            pytest.fail(f"waited {seconds:.0f} s in vain: {what}")
        time.sleep(every)
    return value

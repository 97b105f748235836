"""Waiting in tests, for something that comes by itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE = 300.0
"""Seconds after which what should have come hangs: others load the machine. Never a measure of speed."""


def eventually(
    what: str | Callable[[], str], is_true: Callable[[], Any], seconds: float = PATIENCE, every: float = 0.1
) -> Any:
    """Waits until `is_true()` gives something true, and returns it.

    Args:
        what: is waited for; a function is called where it did not come.

    Raises:
        AssertionError: it did not come in time.
    """
    deadline = time.monotonic() + seconds
    while not (value := is_true()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:.0f} s in vain: {what if isinstance(what, str) else what()}")
        time.sleep(every)
    return value

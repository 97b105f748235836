"""Which cases of a test `make test` leaves to `make test-minutes`."""

from __future__ import annotations

from typing import Any

import pytest


def later(*cases: Any) -> list[Any]:
    """Cases of a parametrized test that go the way of the one before them once more, and take long."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.minutes) for case in cases]

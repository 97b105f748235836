"""Writes what `.ci/run` asks for: failed tests into the file that TEST_FAILURES names, for `.ci/again.py` to run them
once more, and the seconds of each test into the file that TEST_TIMES names. With TEST_TURN=N, only a third of the cases
of each test that is marked `turns` runs, and another third with N + 1.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

THIRDS = 3
"""Number of turns after which each case of a test that is marked `turns` has run."""
NEVER, PERHAPS = "never", "perhaps"
"""Whether a failure of the test may be forgiven when the test passes twice afterwards."""


def _write(variable: str, value: object, name: str) -> None:
    """Add a line on a test, unless this process is one of several that report to another one."""
    if (file := os.environ.get(variable)) and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(file).open("a") as lines:
            lines.write(f"{value}\t{name}\n")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _write("TEST_TIMES", f"{report.duration:.2f}", report.nodeid)
    if report.failed:
        # A worker that crashed reports no keywords: nobody knows what it has left behind.
        known = report.keywords and "never_forgiven" not in report.keywords
        _write("TEST_FAILURES", PERHAPS if known else NEVER, report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write("TEST_FAILURES", NEVER, report.nodeid)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not (turn := os.environ.get("TEST_TURN")):
        return
    seen: Counter[str] = Counter()
    left_out = []
    for item in items:
        if item.get_closest_marker("turns"):
            function = item.nodeid.partition("[")[0]
            if (seen[function] + int(turn)) % THIRDS:
                left_out.append(item)
            seen[function] += 1
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]

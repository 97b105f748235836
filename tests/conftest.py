"""Writes what `.ci/run` asks for: failed tests into the file that TEST_FAILURES names, for `.ci/again.py` to run them
once more, and the seconds of each test into the file that TEST_TIMES names. With TEST_TURN=N, every sixth of the tests
that are marked `minutes` runs and every third of those that are marked `turns`, and the next ones with N + 1. A file
whose `pytestmark` has the mark counts as one test: its tests share what they make.
TEST_FILES_TURN=N does the same with every sixth file of tests.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

LONGEST = ("proof", "sessions", "supervise")
"""Folders whose files have the longest tests: run last, one of them would keep a single core busy."""
TURNS, FEW = 6, 3
"""Numbers of turns after which each test has run."""
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
    items.sort(key=lambda item: item.path.parent.name not in LONGEST)
    left_out = set[pytest.Item]()
    if turn := os.environ.get("TEST_TURN"):
        for marker, turns in (("minutes", TURNS), ("turns", FEW)):
            marked: dict[object, list[pytest.Item]] = {}  # maps a test or a file to its tests
            for item in items:
                if carriers := [node for node, _ in item.iter_markers_with_node(marker)]:
                    marked.setdefault(carriers[-1], []).append(item)
            for place, tests in enumerate(marked.values()):
                left_out.update(tests if (place + int(turn)) % turns else ())
    if turn := os.environ.get("TEST_FILES_TURN"):
        # whole files, whose tests may share what they have made
        files = {path: place for place, path in enumerate(sorted({item.path for item in items}))}
        left_out |= {item for item in items if (files[item.path] + int(turn)) % TURNS}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]

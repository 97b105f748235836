"""Writes the tests that failed into the file that TEST_FAILURES names, for `.ci/again.py` to run them once more."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

NEVER, PERHAPS = "never", "perhaps"
"""Whether a failure of the test may be forgiven when the test passes twice afterwards."""


def _write(name: str, forgiven: str) -> None:
    """Add a failed test, unless this process is one of several that report to another one."""
    if (file := os.environ.get("TEST_FAILURES")) and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(file).open("a") as failures:
            failures.write(f"{forgiven}\t{name}\n")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        # A worker that crashed reports no keywords: nobody knows what it has left behind.
        known = report.keywords and "never_forgiven" not in report.keywords
        _write(report.nodeid, PERHAPS if known else NEVER)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write(report.nodeid, NEVER)

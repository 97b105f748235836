"""The tests of the package pass inside, too: another Python, other packages, no root, no ptrace, a read-only checkout.

Each case is one room of `make test`. All of it: make test-image IN=tests/image/test_inside.py TEST_ALL=1
"""

from __future__ import annotations

import os

import pytest
from conftest import Station

ROOMS = {
    "launcher": "tests/train/launcher",
    "checkpoint": "tests/train/checkpoint",
    "run": "tests/train/run",
    "commands": "tests/train/commands",
    "weights": "tests/train/trainer/test_initial_weights.py",
    "examples": "tests/examples",
}
if os.environ.get("TEST_ALL"):
    ROOMS = {"all": ""}
FAILURES = "/tmp/test-failures"


@pytest.mark.parametrize("room", ROOMS)
def test_make_test_passes_inside(station: Station, request: pytest.FixtureRequest, room: str) -> None:
    arguments = [f"IN={ROOMS[room]}", "ARGS=-q -m 'not bench'" if room == "examples" else "ARGS=-q"]
    station.dev("rm", "-f", FAILURES)
    done = station.dev("env", f"TEST_FAILURES={FAILURES}", "make", "test", *arguments, check=False, timeout=3600)
    failed = station.dev("cat", FAILURES, check=False).stdout
    if "never\t" in failed:
        request.node.add_marker("never_forgiven")
    assert done.returncode == 0, failed + done.stdout[-6000:] + done.stderr[-3000:]
    assert "could not create cache" not in done.stdout
    assert not (station.folder / ".venv").exists()

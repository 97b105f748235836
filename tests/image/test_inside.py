"""What depends on the machine passes inside, too: another Python, other packages, no root, a read-only checkout.

All of `make test`: make test-image IN=tests/image/test_inside.py TEST_ALL=1
"""

from __future__ import annotations

import os

import pytest
from conftest import Station

ROOMS = {
    # processes and tmux; files and their modes, which root does not feel; packages. One call, because each one starts
    # workers that import torch.
    "machine": "tests/train/launcher tests/train/run tests/train/test_caches.py "
    "tests/train/data/test_workers.py tests/train/commands/test_bad_input.py tests/train/commands/test_debuggers.py "
    "tests/train/build/test_initial_weights.py",
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

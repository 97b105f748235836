"""What depends on the machine passes inside, too: another Python, other packages, no root, a read-only checkout.

All of `make test`: make test-image IN=tests/image/test_inside.py TEST_ALL=1
"""

from __future__ import annotations

import os

import pytest
from conftest import Station

ROOMS = {
    # What differs inside: processes and tmux under another init, modes of files (root does not feel them), packages.
    # The host runs all of these files, too. One call, because each one starts workers that import torch.
    "machine": "tests/train/launcher/test_keeper.py tests/train/launcher/test_launch.py "
    "tests/train/launcher/test_launch_scripts.py tests/train/launcher/test_script.py "
    "tests/train/launcher/test_script_faults.py::"
    "test_whatever_a_script_has_started_ends_with_it_except_a_tmux_server "
    "tests/train/run/test_environment.py tests/train/run/test_imports.py tests/train/run/test_ownership.py "
    "tests/train/run/test_run_folder.py tests/train/test_caches.py tests/train/data/test_workers.py "
    "tests/train/commands/test_bad_input.py::test_a_runs_folder_that_cannot_be_written_is_refused "
    "tests/train/commands/test_debuggers.py",
    # Each notebook runs from its first cell to its last, in an empty folder.
    "course": "tests/notebooks/test_notebooks.py",
    # The operators that torchvision compiles. The other examples use only what the course uses; the host trains them.
    "examples": "tests/examples/test_examples.py",
}
ARGUMENTS = {"course": "-q -m minutes", "examples": "-q -m minutes -k detection"}
if os.environ.get("TEST_ALL"):
    ROOMS = {"all": ""}
FAILURES = "/tmp/test-failures"


@pytest.mark.parametrize("room", ROOMS)
def test_make_test_passes_inside(station: Station, request: pytest.FixtureRequest, room: str) -> None:
    arguments = [f"IN={ROOMS[room]}", f"ARGS={ARGUMENTS.get(room, '-q')}"]
    station.dev("rm", "-f", FAILURES)
    done = station.dev("env", f"TEST_FAILURES={FAILURES}", "make", "test", *arguments, check=False, timeout=3600)
    failed = station.dev("cat", FAILURES, check=False).stdout
    if "never\t" in failed:
        request.node.add_marker("never_forgiven")
    assert done.returncode == 0, failed + done.stdout[-6000:] + done.stderr[-3000:]
    assert "could not create cache" not in done.stdout
    assert not (station.folder / ".venv").exists()

"""What depends on the machine passes inside, too: another Python, other packages, no root, a read-only checkout."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from conftest import ROOT, Station, run


def commits() -> str:
    """By this number tests and notebooks take turns from commit to commit."""
    return run("git", "-C", str(ROOT), "rev-list", "--count", "HEAD").stdout.strip()


def notebooks() -> str:
    """What chooses the notebooks that are due."""
    listed = run(str(ROOT / ".venv/bin/python"), str(ROOT / "scripts/course.py"), "--due", commits()).stdout
    return " or ".join(listed.split())


CALLS = {
    # In CI a sixth of the files, by turns: the host runs all of them.
    "all": lambda: ("", "-q"),
    # Each notebook runs from its first cell to its last, in an empty folder.
    "course": lambda: ("tests/notebooks/test_notebooks.py", f"-q -m minutes -k '{notebooks()}'"),
    # The operators that torchvision compiles. The other examples use only what the course uses; the host trains them.
    "examples": lambda: ("tests/examples/test_examples.py", "-q -m minutes -k detection"),
}
"""Maps what runs to IN and ARGS of `make test`."""
FAILURES, TIMES = "/tmp/test-failures", "/tmp/test-times"


@pytest.mark.parametrize("what", CALLS)
def test_make_test_passes_inside(station: Station, request: pytest.FixtureRequest, what: str) -> None:
    chosen, arguments = CALLS[what]()
    station.dev("rm", "-f", FAILURES, TIMES)
    command = ["env", f"TEST_FAILURES={FAILURES}", f"TEST_TIMES={TIMES}", "make", "test"]
    if what == "all" and os.environ.get("CI"):
        command[1:1] = [f"TEST_FILES_TURN={commits()}", f"TEST_TURN={commits()}"]
    done = station.dev(*command, f"IN={chosen}", f"ARGS={arguments}", check=False, timeout=3600)
    failed = station.dev("cat", FAILURES, check=False).stdout
    if file := os.environ.get("TEST_TIMES"):
        with Path(file).open("a") as times:
            times.write(station.dev("cat", TIMES, check=False).stdout.replace("\t", "\tinside "))
    if "never\t" in failed:
        request.node.add_marker("never_forgiven")
    assert done.returncode == 0, failed + done.stdout[-6000:] + done.stderr[-3000:]
    assert "could not create cache" not in done.stdout
    assert not (station.folder / ".venv").exists()

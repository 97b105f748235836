"""A station with runs, and the page of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from web import Web

from tests.train.conftest import Station

SCRIPT = """
for step in range(1, 4):
    print(f"\\x1b[32mstep\\x1b[0m {step} loss {1 / step} <i>x</i> 3", flush=True)
raise ValueError("no <b>such</b> layer \\x1b[31mred\\x1b[0m <script>alert(1)</script>")
"""


@pytest.fixture(scope="session")
def shown(finished: Station) -> Station:
    """The shared folder, with a finished run and one that failed with markup in its reason and its log."""
    script = finished.folder / "hostile.py"
    script.write_text(SCRIPT)
    finished.ok("launch", "--script", script, "--name", "hostile", "--max-restarts", 0)
    assert finished.wait_for_end("hostile")["state"] == "failed"
    with (finished.runs / "hostile" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "</script><u>m": 1.5}) + "\n")
    return finished


@pytest.fixture(scope="session")
def web(shown: Station) -> Iterator[Web]:
    """The page of the shared folder."""
    made = Web(shown)
    yield made
    made.close()


@pytest.fixture
def webs() -> Iterator[Callable[..., Web]]:
    """Starts pages, and ends them with the test."""
    made: list[Web] = []

    def make(station: Station, **env: str) -> Web:
        made.append(Web(station, **env))
        return made[-1]

    yield make
    for one in made:
        one.close()

"""Commands of README and docs that set up and use a station, executed as they stand in a fresh checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, Station, copy_checkout
from test_two_checkouts import Checkout

sys.path.insert(0, str(ROOT))
from tests.docs import pages  # this environment does not have the checkout on its path

MARK = f"tested by {Path(__file__).relative_to(ROOT)}"


@pytest.fixture(scope="module")
def checkout(station: Station, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkout]:
    """A fresh checkout. The image is there, for `station` has built it; .venv is the one of this checkout."""
    folder = tmp_path_factory.mktemp("pages")
    one = Checkout(copy_checkout(folder / "trainstation", owner=None), folder)
    (one.folder / ".venv").symlink_to((ROOT / ".venv").resolve())
    yield one
    one.make("clean-station", check=False)
    shutil.rmtree(folder, ignore_errors=True)


def execute(one: Checkout, script: str) -> None:
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", script],
        cwd=one.folder,
        env=one.env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-6000:]}"


def marked() -> list[pages.Page]:
    """The pages that leave commands to this file, README first: its commands are the ones that people type first."""
    return [page for page in map(pages.read, pages.english()) if any(block.mark == MARK for block in page.blocks)]


@pytest.mark.parametrize("page", marked(), ids=lambda page: page.name)
def test_the_commands_of_a_page_do_in_a_fresh_checkout_what_it_says(page: pages.Page, checkout: Checkout) -> None:
    commands = [command.text for block in page.blocks if block.mark == MARK for command in pages.commands(block)]
    execute(checkout, "\n".join(commands))


def test_readme_and_the_page_on_the_station_have_such_commands() -> None:
    assert {"README.md", "docs/station.md"} <= {page.name for page in marked()}

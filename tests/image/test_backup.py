"""Upgrade, back up, restore and move a station, by the commands of docs/station.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, Station, base_image, copy_checkout, run
from test_two_checkouts import Checkout

from tests.waiting import eventually

sys.path.insert(0, str(ROOT))
from tests.docs import pages  # this environment does not have the checkout on its path

pytestmark = pytest.mark.turns

MARK = f"tested by {Path(__file__).relative_to(ROOT)}"
UPGRADE, BACK_UP, RESTORE, SAVE, LOAD = (
    block.text for block in pages.read(ROOT / "docs" / "station.md").blocks if block.mark == MARK
)
"""The commands of the page, as they stand."""


@pytest.fixture(scope="module")
def mine(station: Station, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkout]:
    """A clone with a station that has drawn its own name, and an endless run in it."""
    folder = tmp_path_factory.mktemp("backup")
    git(copy_checkout(folder / "origin"), "init", "--quiet")
    commit(folder / "origin")
    git(folder, "clone", "--quiet", str(folder / "origin"), "trainstation")
    one = Checkout(folder / "trainstation", folder)
    friendly = run("docker", "image", "inspect", "-f", "{{.Id}}", "trainstation:runtime").stdout.strip()
    one.make("up")
    train(one, "launch", "digits", "--name", "demo1", "--nproc", "1", "--epochs", "1000000")
    yield one
    one.make("clean-station", check=False)
    run("docker", "tag", friendly, "trainstation:runtime")
    run("docker", "image", "inspect", station.inspect("{{.Config.Image}}"))  # clean-station has left it


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=x", "-c", "user.email=x@localhost", "-c", "safe.directory=*")
    run("git", *who, *words, cwd=folder)


def commit(folder: Path) -> None:
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "--quiet", "--message", "A revision")


def shell(one: Checkout, folder: Path, script: str) -> str:
    """Run a script in a folder, as a person does. Returns what it printed."""
    trusted = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
    return run("bash", "-euc", script, cwd=folder, env={**one.env, **trusted}, timeout=900).stdout


def train(one: Checkout, *words: str) -> subprocess.CompletedProcess[str]:
    return run(str(one.folder / "scripts" / "train"), *words, env=one.env)


def step(one: Checkout) -> int:
    """The last step of the run while it is running, else 0."""
    record = json.loads(train(one, "show", "demo1", "--json").stdout)
    return int(record.get("step") or 0) if record["state"] == "running" else 0


def continues(one: Checkout) -> None:
    """Wait until the run is running and has taken a step."""
    eventually("the run continues", lambda: step(one) > 0)


def test_an_upgrade_builds_the_new_image_and_runs_continue(mine: Checkout) -> None:
    continues(mine)
    before = mine.setting("STATION_BUILT")
    origin = mine.folder.parent / "origin"
    (origin / "docker" / "rootfs" / "etc" / "tmux.conf").write_text(f"# {origin}\n")
    commit(origin)
    printed = shell(mine, mine.folder, UPGRADE)
    assert "built in" in printed
    assert "resumes them: demo1" in printed
    assert mine.inspect("{{.Config.Image}}") == mine.setting("STATION_BUILT") != before
    continues(mine)


def test_a_restored_station_keeps_its_home_keys_and_runs(mine: Checkout) -> None:
    run("docker", "exec", "--user", "dev", mine.container, "sh", "-c", "echo note >/home/dev/note")
    belongings = mine.belongings
    shell(mine, mine.folder, BACK_UP)
    continues(mine)
    assert oct((mine.folder.parent / "volumes.tar").stat().st_mode)[-3:] == "600"
    mine.make("clean-station")
    mine.folder.rename(mine.folder.parent / "lost")
    printed = shell(mine, mine.folder.parent, RESTORE)
    assert "it keeps its station" in printed
    mine.folder = mine.folder.parent / "restored"
    continues(mine)
    assert run("docker", "exec", mine.container, "cat", "/home/dev/note").stdout == "note\n"
    run("bash", "-c", mine.make("ssh-command").stdout.strip() + " true", env=mine.env)
    assert mine.belongings == belongings


def test_an_image_is_saved_and_loaded_under_its_name(tmp_path: Path) -> None:
    image = f"trainstation-moved:{os.getpid()}"  # a small one in place of the station's 6 GB
    run("docker", "tag", base_image(), image)
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / ".env").write_text(f"STATION_BUILT={image}\n")
    load, up = LOAD.splitlines()
    assert up == "make up"
    try:
        run("bash", "-euc", SAVE, cwd=folder)
        run("docker", "image", "rm", image)
        assert run("docker", "image", "inspect", image, check=False).returncode
        run("bash", "-euc", load, cwd=folder)
    finally:
        run("docker", "image", "rm", image)

"""The page for coding agents is short, and the station gives it to a person once."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.docs import pages

STEP = pages.ROOT / "docker/rootfs/usr/local/lib/trainstation/steps/20-user"


def start(folder: Path) -> None:
    """Execute what the station's start does with the page, in this folder."""
    inner = next(
        code for code in re.findall(r"as_user sh -c '(.*?)' \|\| :", STEP.read_text(), re.S) if "AGENTS" in code
    )
    for there in ("/home/dev", "/workspace/projects", "/etc/trainstation"):
        assert there in inner
    inner = inner.replace("/etc/trainstation", str(pages.AGENTS.parent))
    for there in ("/home/dev", "/workspace/projects"):
        inner = inner.replace(there, f"{folder}{there}")
    done = subprocess.run(["sh", "-c", inner], capture_output=True, text=True, check=True)
    assert not done.stdout + done.stderr


def test_the_page_is_short_and_its_commands_are_those_of_the_pages() -> None:
    assert len(pages.AGENTS.read_text().splitlines()) <= 60
    assert pages.AGENTS in pages.english()  # so that each command of it is parsed, and executed in order


def test_a_start_writes_the_page_and_keeps_what_is_there(tmp_path: Path) -> None:
    home, projects = tmp_path / "home/dev", tmp_path / "workspace/projects"
    start(tmp_path)  # neither folder is there
    assert not home.exists() and not projects.exists()
    home.mkdir(parents=True)
    projects.mkdir(parents=True)
    start(tmp_path)
    assert (home / "AGENTS.md").read_bytes() == (projects / "AGENTS.md").read_bytes() == pages.AGENTS.read_bytes()
    (projects / "AGENTS.md").write_text("mine")
    (home / "AGENTS.md").unlink()
    (home / "AGENTS.md").symlink_to("nowhere")
    start(tmp_path)
    assert (projects / "AGENTS.md").read_text() == "mine"
    assert (home / "AGENTS.md").readlink() == Path("nowhere") and not (home / "nowhere").exists()

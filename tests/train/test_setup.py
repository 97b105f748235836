"""`make setup` leaves an environment that is a link as it is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("target", "code", "words"), [(sys.prefix, 0, ""), ("/none", 2, "is a link to /none, which holds no")]
)
def test_an_environment_that_is_a_link_stays_one(tmp_path: Path, target: str, code: int, words: str) -> None:
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/setup.sh", "scripts/env.sh", "scripts/progress.sh", "requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".venv").symlink_to(target)
    environment = {name: value for name, value in os.environ.items() if name not in ("TRAINSTATION_IMAGE", "PYTHON")}
    unreachable = {"PIP_INDEX_URL": "http://127.0.0.1:9", "PIP_RETRIES": "0"}  # were one to be made, it would end here
    done = subprocess.run(
        ["bash", "scripts/setup.sh"], cwd=tmp_path, env=environment | unreachable, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (code, "") and words in done.stderr, done.stderr
    assert (tmp_path / ".venv").is_symlink()
    assert not (tmp_path / ".venv.lock").exists()

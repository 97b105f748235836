"""What made a run is recorded, whatever it runs and however it was started."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.train.conftest import Station

SESSION = """
import torch, trainstation as ts
session = ts.session(seed=0)
model = torch.nn.Linear(1, 1)
session.register(model=model)
for epoch in session.epochs(1):
    pass
session.finish()
"""


@pytest.fixture
def checkout(station: Station) -> Station:
    """A folder that is a clean checkout, with the files to run."""
    (station.folder / "script.py").write_text("pass")
    (station.folder / "loop.py").write_text(SESSION)
    (station.folder / ".gitignore").write_text("runs\n__pycache__\n")
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "."), (*who, "commit", "-qm", "a")):
        subprocess.run(["git", *words], cwd=station.folder, check=True)
    return station


def test_versions_and_the_commit_are_recorded_of_every_run(checkout: Station) -> None:
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=checkout.folder, text=True).strip()
    checkout.ok("run", "digits", "--name", "task", "--steps", 1)
    checkout.ok("launch", "--script", "script.py", "--name", "script", "--follow")
    subprocess.run([sys.executable, "loop.py"], cwd=checkout.folder, env=checkout.environment(), check=True)
    (checkout.folder / "script.py").write_text("edited = 1")
    checkout.ok("launch", "--script", "script.py", "--name", "edited", "--follow")
    records = {path.parent.name: checkout.record(path.parent.name) for path in checkout.runs.glob("*/run.json")}
    found = {name.partition("-")[0]: record["git_revision"] for name, record in records.items()}
    assert found == {"task": commit, "script": commit, "loop": commit, "edited": f"{commit}-dirty"}
    assert all({"train", "python", "torch"} <= record["versions"].keys() for record in records.values())
    assert f"  git          {commit}\n" in checkout.ok("show", "script").stdout

"""`train archive`: a run that is unpacked elsewhere, without the files of its launch, ends with the same bits."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.train.conftest import Station
from train.code import imports
from train.run.ownership import MODULES

pytestmark = pytest.mark.never_forgiven

TASK = """
import torch
from torch.utils.data import TensorDataset
from nets import wide
from scale import FACTOR

def datasets(config):
    points = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(points, points[:, :3].argmax(1))
    return data, TensorDataset(*data[:20])

def model(config):
    return wide.make()

def loss(model, batch):
    return FACTOR * torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
"""
BESIDE = {
    "task.py": TASK,
    "scale.py": "FACTOR = 1.0\n",
    "nets/wide.py": "from .parts.layers import layer\n\ndef make():\n    return layer(4, 3)\n",  # no __init__.py
    "nets/parts/__init__.py": "from torch.nn import Linear\n",
    "nets/parts/layers.py": "from . import Linear\n\ndef layer(*sizes):\n    return Linear(*sizes)\n",
}
FIELDS = (
    "--steps", 16, "--batch_size", 20, "--optim.lr", 0.1, "--init", "wild.pt", "--checkpoint.every_steps", 4,
    "--checkpoint.asynchronous", "false", "--log.every_steps", 1, "--log.samples", "true", "--cpu_threads", 1,
)  # fmt: skip


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Station]:
    """With the run `whole`, and `killed`, which lost all its processes between two checkpoints; and killed.tar."""
    made = Station(tmp_path_factory.mktemp("archive") / "here")
    for name, text in BESIDE.items():
        (made.folder / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (made.folder / "mine" / name).write_text(text)
    torch.save(torch.nn.Linear(4, 3).state_dict(), made.folder / "wild.pt")
    made.ok("run", "mine/task.py", "--name", "whole", *FIELDS)
    fault = {"TRAIN_FAULT": "update:10,decided"}
    made("launch", "mine/task.py", "--name", "killed", *FIELDS, "--max-restarts", 0, "--follow", env=fault)
    assert made.wait_for_end("killed")["state"] == "interrupted"
    made.ok("archive", "killed")
    yield made
    made.close()


@pytest.fixture
def there(here: Station, tmp_path: Path) -> Iterator[Station]:
    """Another folder, while the one of the launch is away: its task, what that imports, its first weights, its runs."""
    made = Station(tmp_path / "there")
    made.runs.mkdir(parents=True)
    away = here.folder.rename(tmp_path / "away")
    subprocess.run(["tar", "-xf", away / "killed.tar", "-C", made.runs], check=True)
    yield made
    made.close()
    away.rename(here.folder)


def test_an_archived_run_goes_on_elsewhere_to_the_same_end(here: Station, there: Station) -> None:
    assert there.run("killed").state() == "copy" and there.run("killed").newest_checkpoint == 8
    assert there.ok("eval", "killed").stdout.startswith("step 8, 20 samples")
    there.ok("resume", "killed", "--follow")
    there.ok("export", "killed", "--to", "weights.pt")
    whole = Station(there.folder.parent / "away")
    record, expected = there.record("killed"), whole.record("whole")
    assert record["attempts"][-1]["from_step"] == 8
    assert record["weights_sha256"] == expected["weights_sha256"] and record["metrics"] == expected["metrics"]
    assert there.samples("killed") == whole.samples("whole") and len(there.samples("killed")) == 16
    assert not here.folder.exists()


def test_a_resume_imports_what_the_run_was_launched_with(here: Station) -> None:
    shutil.copytree(here.runs / "killed", here.runs / "edited")
    scale = here.folder / "mine" / "scale.py"
    scale.write_text("FACTOR = 0.5\n")
    try:
        done = here.ok("resume", "edited", "--follow")
    finally:
        scale.write_text(BESIDE["scale.py"])
    changed = f"{scale} (imported by the task) changed since the launch or is gone"
    assert f"{changed}; edited continues with its own copy" in done.stderr
    assert here.record("edited")["weights_sha256"] == here.record("whole")["weights_sha256"]


def test_a_run_whose_copy_of_modules_was_changed_does_not_go_on_by_itself(here: Station) -> None:
    kept = here.runs / "killed" / MODULES
    before = kept.read_bytes()
    with zipfile.ZipFile(kept, "a") as zipped:
        zipped.writestr("more.py", "")
    assert here.run("killed").state() == "copy"
    kept.write_bytes(before)
    assert here.run("killed").state() == "interrupted"


def test_an_archive_holds_the_run_alone_and_its_owner_alone_reads_it(here: Station, tmp_path: Path) -> None:
    (here.run("whole").checkpoints / ".partial-9").mkdir()
    (here.runs / "whole" / "stop").touch()
    (here.runs / "whole" / "logs" / "program").touch()
    (here.runs / "whole" / "logs" / "program").chmod(0o6755)
    target = tmp_path / "a b.tar"
    done = here.ok("archive", "whole", "--to", target)
    assert done.stdout == ""
    assert f"tar -xkof '{target}' --no-same-permissions -C runs && train resume whole" in done.stderr
    with tarfile.open(target) as tar:
        members = {member.name: member for member in tar.getmembers()}
    left_out = {"whole/checkpoints/.partial-9", "whole/stop"}
    present = {str(path.relative_to(here.runs)) for path in (here.runs / "whole").rglob("*")}
    assert members.keys() == {"whole", *present} - left_out and "whole/checkpoints/step-00000016/.metadata" in members
    assert {(member.uid, member.uname, member.mode & 0o7000) for member in members.values()} == {(0, "", 0)}
    assert target.stat().st_mode & 0o777 == 0o600


def test_what_is_on_pythonpath_is_kept_under_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {
        "mine/task.py": "import first, lib.second\n", "mine/first.py": "", "src/first.py": "1 / 0\n",
        "src/lib/second.py": "import numpy, lib.third as three\n", "src/lib/third.py": "three = 3\n",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "src"))
    (tmp_path / "kept.zip").write_bytes(imports.read(tmp_path / "mine" / "task.py", tmp_path / "mine").files()[MODULES])
    code = "import first, lib.second; print(lib.second.three.three, first.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path / "kept.zip")}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.stdout == f"3 {tmp_path / 'kept.zip' / 'first.py'}\n", done.stderr


@pytest.mark.parametrize(
    ("change", "arguments", "words"),
    [
        ({}, ["nobody"], "there is no run nobody"),
        ({}, ["odd", "--to", "taken.tar"], "taken.tar exists"),
        ({}, ["odd", "--to", "odd.tgz"], "must end in .tar"),
        ({}, ["odd", "--to", "nowhere/odd.tar"], "there is no folder nowhere"),
        ({"script": "s.py"}, ["odd"], "odd runs a script"),
        ({"submission": "1", "submitted": {"engine": "slurm"}}, ["odd"], "archive a fork of it"),
        ({"cluster": {"least": 2, "most": 2, "node": 0, "rendezvous": "a:1"}}, ["odd"], "archive a fork of it"),
        ({"link": "logs"}, ["odd"], "odd/logs/linked is a link"),
        ({"alive": True}, ["odd"], "odd is running; stop it first: train stop odd"),
    ],
)
def test_what_cannot_be_archived_is_refused_and_leaves_nothing(
    here: Station, change: dict[str, object], arguments: list[str], words: str
) -> None:
    shutil.rmtree(here.runs / "odd", ignore_errors=True)
    shutil.copytree(here.runs / "whole", here.runs / "odd")
    (here.folder / "taken.tar").write_text("mine")
    (here.runs / "odd" / "wandb").mkdir()  # links of that service are left out
    for folder in ("wandb", *([change.pop("link")] if "link" in change else [])):
        (here.runs / "odd" / str(folder) / "linked").symlink_to("/etc")
    lock = here.run("odd").acquire() if change.pop("alive", False) else None
    here.run("odd").update(**change)
    before = sorted(here.folder.iterdir())
    done = here("archive", *arguments)
    if lock is not None:
        lock.release()
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and words in done.stderr, done.stderr
    assert sorted(here.folder.iterdir()) == before and (here.folder / "taken.tar").read_text() == "mine"


def test_where_there_is_no_room_no_half_file_stays(here: Station) -> None:
    before = sorted(here.folder.iterdir())
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 20; exec {sys.executable} -m train archive whole"],
        cwd=here.folder, env=here.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr == "train: --to whole.tar: cannot be written: File too large\n"
    assert sorted(here.folder.iterdir()) == before

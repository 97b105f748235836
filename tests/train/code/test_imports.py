"""What a task imports and reads is what the run was launched with: real libraries under development, real kills."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.train.conftest import Station
from train.code import changes, copies, imports
from train.run import folders
from train.run.owner import TrustedRun
from train.run.run_folder import Run
from train.run.spec import read_spec, spec_of

pytestmark = pytest.mark.turns

TASK = """
import json
import time
from pathlib import Path

import torch
from flat.losses import criterion
from helper import FACTOR
from lab.parts import deep
from torch.utils.data import TensorDataset

WORDS = json.loads((Path(__file__).parent / "words.json").read_text())
DATA = Path(__file__).resolve().parents[1] / "data"

def datasets(config):
    count = int((DATA / "count.txt").read_text())
    return TensorDataset(torch.randn(count, 4, generator=torch.Generator().manual_seed(1))), None

def model(config):
    return torch.nn.Linear(4, 1)

def loss(model, batch):
    time.sleep(0.02)
    return criterion(model(batch[0])) * len(WORDS) * FACTOR * deep.scale()
"""
FILES = {
    "project/src/task.py": TASK,
    "project/src/words.json": '["a", "b"]',
    "project/data/count.txt": "60",
    "project/src/helper.py": "from pathlib import Path\n"
    "FACTOR = float((Path(__file__).parent / 'factor.txt').read_text())\n",
    "project/src/factor.txt": "0.5",
    "flat/flat/__init__.py": "",
    "flat/flat/losses.py": "def criterion(made):\n    from . import late\n    return late.power(made).mean()\n",
    "flat/flat/late.py": "def power(made):\n    return made ** 2\n",
    "lab/src/lab/parts/deep.py": "from flat.weights import W\ndef scale():\n    return W\n",  # a namespace
    "flat/flat/weights.py": "W = 1.0\n",
    # as setuptools installs them: a path, and an import hook
    "site-packages/lab.pth": "{here}/lab/src\n",
    "site-packages/flat.pth": "import __editable___flat_finder; __editable___flat_finder.install()\n",
    "site-packages/__editable___flat_finder.py": "import sys\n"
    "from importlib.util import spec_from_file_location\n"
    "class Finder:\n"
    "    @classmethod\n"
    "    def find_spec(cls, name, path=None, target=None):\n"
    "        if name == 'flat':\n"
    "            return spec_from_file_location(name, '{here}/flat/flat/__init__.py')\n"
    "def install():\n"
    "    sys.meta_path.insert(0, Finder)\n",
    "start/sitecustomize.py": "import site\nsite.addsitedir('{here}/site-packages')\n",
}
EDITS = {
    "project/src/task.py": "raise RuntimeError('edited')\n",
    "project/src/words.json": "[]",
    "project/src/factor.txt": "7",
    "flat/flat/late.py": "def power(made):\n    return made * 1000\n",
    "lab/src/lab/parts/deep.py": "def scale():\n    return 3.0\n",
}
FLAGS = ("--steps", 60, "--batch_size", 20, "--optim.lr", 0.1, "--cpu_threads", 1, "--log.tensorboard", "false")


@pytest.fixture
def station(tmp_path: Path) -> Iterator[Station]:
    """With a task and two libraries under development."""
    made = Station(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text.replace("{here}", str(tmp_path)))
    yield made
    made.close()


@pytest.mark.never_forgiven
def test_a_killed_rank_and_a_resume_elsewhere_use_what_the_run_began_with(station: Station) -> None:
    path = os.pathsep.join([str(station.folder / "start"), station.environment()["PYTHONPATH"]])
    env = {"PYTHONPATH": path}
    station.ok("run", "project/src/task.py", "--name", "still", "--spawn", 2, *FLAGS, env=env)
    station.ok("launch", "project/src/task.py", "--name", "killed", "--nproc", 2, *FLAGS, env=env)
    station.wait_for_step("killed", 5)
    for name, text in EDITS.items():
        (station.folder / name).write_text(text)
    os.kill(station.record("killed")["pids"]["ranks"][1], signal.SIGKILL)
    station.wait("killed", lambda record: len(record["attempts"]) == 2 and record["step"] > 10, "a step after it")
    station.ok("stop", "killed")
    told = station.ok("show", "killed").stdout + station.logs("killed")
    for name in ("late.py", "deep.py", "words.json", "factor.txt"):
        assert told.count(name) >= 2, told
    station.ok("archive", "killed")
    for name in ("project", "flat", "lab", "start", "runs"):
        shutil.move(station.folder / name, station.folder / f"was-{name}")
    station.runs.mkdir()
    shutil.unpack_archive(station.folder / "killed.tar", station.runs)
    (station.folder / "project" / "data").mkdir(parents=True)  # data are taken along
    shutil.copy(station.folder / "was-project" / "data" / "count.txt", station.folder / "project" / "data")
    (station.folder / "project" / "src").mkdir()
    station.ok("resume", "killed", "--follow")
    still = Run(station.folder / "was-runs" / "still").read()
    assert station.record("killed")["weights_sha256"] == still["weights_sha256"]


def test_of_a_library_with_compiled_parts_or_too_much_code_there_are_digests_alone(
    station: Station, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = station.folder
    monkeypatch.setenv("PYTHONPATH", f"{here / 'flat'}{os.pathsep}{here / 'lab' / 'src'}")
    task = here / "project" / "src" / "task.py"
    assert {"flat/late.py", "lab/parts/deep.py", "helper.py"} <= imports.read(task, task.parent).copied.keys()
    compiled = here / "flat" / "flat" / f"late{sysconfig.get_config_var('EXT_SUFFIX')}"
    (here / "flat" / "flat" / "late.py").rename(compiled)
    (here / "lab" / "src" / "lab" / "parts" / "large.py").write_text("#" * (imports._LARGEST + 1))
    deep = here / "lab" / "src" / "lab" / "parts" / "deep.py"
    deep.write_text(f"import lab.parts.large\n{deep.read_text()}")
    needed = imports.read(task, task.parent)
    assert needed.copied.keys() == {"helper.py"} and {str(compiled), str(deep)} <= needed.watched.keys()
    launched = spec_of({"task_watched": needed.watched}, {})
    run = Run(here)
    assert changes.edited(run, launched) == []
    compiled.write_bytes(b"built again")
    (said,) = changes.edited(run, launched)
    assert said.startswith(f"{compiled} (imported") and said.endswith("continues with the new version")


@pytest.mark.never_forgiven
def test_a_module_that_is_imported_late_is_the_one_of_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_pack").mkdir()
    for name, text in {
        "task.py": "import late_pack.one",
        "late_pack/__init__.py": "",
        "late_pack/one.py": "V = 1",
    }.items():
        (tmp_path / name).write_text(text)
    needed = imports.read(tmp_path / "task.py", tmp_path)
    record = needed.record() | {"task_source": str(tmp_path / "task.py")}
    made = folders.create(tmp_path / "runs", "a", files={**needed.files()}, record=record)
    run = TrustedRun(made)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    code = copies.of_run(run, read_spec(run))
    assert code == (tmp_path / "task.py", [tmp_path], False)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "late_pack" / "one.py").write_text("V = 2")
    module = importlib.import_module("late_pack.one")
    assert (module.V, module.__file__) == (1, str(tmp_path / "late_pack" / "one.py"))
    assert copies.of_run(run, read_spec(run)).are_copies
    copies.clear(run)
    assert not list(made.folder.glob(".code*"))

"""A user's own file: unmodified on one and several processes, with settings, helpers beside it, and a copy kept."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from tests.tasks import TASKS
from tests.train.specs import with_spec
from train.errors import Refused
from train.launcher.checks import prepare
from train.launcher.request import Request, resolve
from train.launcher.resume import prepare_resume
from train.tasks import load
from train.trainer.export import export

if TYPE_CHECKING:
    from conftest import Station

TASK = '''"""Two moons, told apart by a small network."""
from dataclasses import dataclass

import torch
from helper import moons
from torch import nn
from torch.utils.data import TensorDataset


@dataclass
class Settings:
    hidden: int = 16
    noise: float = 0.1


def model(config):
    return nn.Sequential(nn.Linear(2, config.task.hidden), nn.Tanh(), nn.Dropout(0.1), nn.Linear(config.task.hidden, 1))


def datasets(config):
    return TensorDataset(*moons(301, config.task.noise)), TensorDataset(*moons(100, config.task.noise))


def loss(model, batch):
    points, side = batch
    return nn.functional.binary_cross_entropy_with_logits(model(points)[:, 0], side)


def metrics(model, batch):
    points, side = batch
    return {"accuracy": ((model(points)[:, 0] > 0) == (side > 0.5)).float().mean()}
'''
HELPER = """
import math
import os
import torch


def moons(count, noise):
    side = (torch.arange(count) % 2).float()
    angle = torch.rand(count) * math.pi
    x = torch.stack([torch.cos(angle) * (1 - 2 * side) + side, torch.sin(angle) * (1 - 2 * side) + side / 2], 1)
    return x + noise * torch.randn(count, 2), side
"""
FLAGS = ["--precision", "fp64", "--optim.name", "sgd", "--optim.lr", 0.5, "--batch_size", 60, "--micro_batch_size", 10,
         "--epochs", 3, "--log.every_steps", 1, "--cpu_threads", 1, "--log.tensorboard", "false"]  # fmt: skip


@pytest.fixture(scope="module")
def here(shared_station: Station) -> Station:
    folder = shared_station.folder / "mine"
    folder.mkdir()
    (folder / "moons.py").write_text(TASK)
    (folder / "helper.py").write_text(HELPER)
    return shared_station


@pytest.mark.never_forgiven
def test_one_file_trains_unmodified_in_one_process_and_in_three_to_the_same_weights(here: Station) -> None:
    here.ok("run", "mine/moons.py", "--name", "moons-one", *FLAGS)
    here.ok("run", "./mine/moons.py", "--name", "moons-three", "--spawn", 3, *FLAGS)
    losses = [[line["loss"] for line in here.metrics(name) if "loss" in line] for name in ("moons-one", "moons-three")]
    assert len(losses[0]) == len(losses[1]) == 18  # 301 samples: the last batch of an epoch has a single one
    assert all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(*losses, strict=True))
    assert losses[0][-2] < losses[0][0]
    assert here.record("moons-one")["metrics"]["accuracy"] == here.record("moons-three")["metrics"]["accuracy"]
    states = []
    for name in ("moons-one", "moons-three"):
        export(*with_spec(here.run(name)), here.folder / f"{name}.safetensors")
        states.append(load_file(here.folder / f"{name}.safetensors"))
    assert states[0].keys() == states[1].keys() == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert all(torch.allclose(states[0][key], states[1][key], rtol=0, atol=1e-9) for key in states[0])


def test_settings_are_flags_and_the_file_is_copied_with_its_digest(here: Station) -> None:
    import hashlib

    here.ok("run", "mine/moons.py", "--name", "moons-wide", "--task.hidden", 5, "--steps", 1)
    record, folder = here.record("moons-wide"), here.runs / "moons-wide"
    assert (folder / "task.py").read_text() == TASK
    assert record["task_sha256"] == hashlib.sha256(TASK.encode()).hexdigest()
    assert record["task_source"] == str(here.folder / "mine" / "moons.py")
    assert "hidden = 5" in (folder / "config.toml").read_text()
    export(*with_spec(here.run("moons-wide")), here.folder / "wide.safetensors")
    assert load_file(here.folder / "wide.safetensors")["0.weight"].shape == (5, 2)
    with pytest.raises(Refused, match=r"did you mean task\.hidden"):
        resolve(Request(task=str(here.folder / "mine" / "moons.py"), flags={"task.hiden": "5"}))


@pytest.mark.never_forgiven
@pytest.mark.minutes
def test_a_resume_goes_on_with_the_copy_where_the_run_was_launched_and_says_that_the_original_has_changed(
    here: Station,
) -> None:
    source = here.folder / "mine" / "changes.py"
    # a path that means something in the folder of the launch only
    text = TASK.replace("def datasets(config):", "def datasets(config):\n    open('mine/helper.py').close()")
    source.write_text(text)
    here.ok("run", "mine/changes.py", "--name", "c", "--steps", 2)
    source.write_text("raise RuntimeError('the new version is broken')\n")
    elsewhere = here.folder / "elsewhere"
    elsewhere.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "train", "resume", "c", "--steps", "4", "--follow", "--runs", str(here.runs)],
        cwd=elsewhere, env=here.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout == "c\n", done.stderr
    warnings = [line for line in done.stderr.splitlines() if "changed since" in line]
    assert len(warnings) == 1 and str(source) in warnings[0] and "copy" in warnings[0]
    assert here.record("c")["step"] == 4 and list(elsewhere.iterdir()) == []
    # a copy that was edited is another task
    (here.runs / "c" / "task.py").write_text(text + "\n# edited\n")
    with pytest.raises(Refused, match="put the original back"):
        prepare_resume(here.run("c"), {"steps": "6"}, 1)


def test_a_resume_says_which_modules_beside_the_task_have_changed(here: Station) -> None:
    folder = here.folder / "beside"
    folder.mkdir()
    (folder / "moons.py").write_text(TASK)
    (folder / "helper.py").write_text("from deeper import *\n")
    (folder / "deeper.py").write_text(HELPER)
    (folder / "other.py").write_text("never imported\n")
    here.ok("run", "beside/moons.py", "--name", "beside", "--steps", 1, "--cpu_threads", 1)
    run = here.run("beside")
    assert prepare_resume(run, {"steps": "2"}, 1)[1] == []
    (folder / "other.py").write_text("nor now\n")
    (folder / "deeper.py").write_text(HELPER + "# edited\n")
    (said,) = prepare_resume(run, {"steps": "2"}, 1)[1]
    assert str(folder / "deeper.py") in said and "continues with its own copy" in said
    assert set(run.read()["task_imports"]) == {str(folder / name) for name in ("helper.py", "deeper.py")}


def test_of_a_built_in_task_no_imports_are_kept(tmp_path: Path) -> None:
    record = prepare(Request(task="fake", flags={"steps": "1", "cpu_threads": "1", "device": "cpu"})).record
    assert record["task_imports"] == {}


def test_a_task_needs_no_import_of_this_package(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("def model(config): ...\ndef datasets(config): ...\ndef loss(model, batch): ...\n")
    task = load(str(tmp_path / "t.py"))
    assert not task.is_built_in and task.Settings is None and task.metrics is None and task.DEFAULTS == {}


def test_two_tasks_of_one_name_are_two_tasks(tmp_path: Path) -> None:
    body = "def model(config): return {}\ndef datasets(config): ...\ndef loss(model, batch): ...\n"
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "t.py").write_text(body.format(number))
    assert [load(str(tmp_path / str(number) / "t.py")).model(None) for number in (1, 2)] == [1, 2]


@pytest.mark.never_forgiven
def test_a_task_edited_within_a_second_is_the_edited_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python takes byte code for its file's by second and size."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "edited.py"
    for value in (1, 2):
        path.write_text(f"DEFAULTS = {{'seed': {value}}}\nmodel = datasets = loss = print\n")
        os.utime(path, (1e9, 1e9))
        assert load(str(path)).DEFAULTS["seed"] == value


def test_a_file_named_as_a_built_in_task_is_reached_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits.py").write_text("x = 1\n")
    assert load("digits").is_built_in
    with pytest.raises(Refused, match="no function model"):
        load("./digits.py")


TWO_LOSSES = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def datasets(config):
    return TensorDataset(torch.rand(32, 4)), None

def model(config):
    return nn.Linear(4, 2)

def loss(model, batch):
    made = model(batch[0]).square().mean(0)
    return made[0], made[1]
"""


@pytest.mark.never_forgiven
def test_two_losses_are_not_taken_for_a_loss_and_its_count(station: Station) -> None:
    (station.folder / "two.py").write_text(TWO_LOSSES)
    done = station("run", "two.py", "--name", "two-losses", "--steps", 1)
    assert done.returncode == 3 and "Traceback" not in done.stderr
    assert "return the sum of two losses" in done.stderr.splitlines()[-1]


def test_what_lies_beside_a_task_goes_before_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed, beside = tmp_path / "installed", tmp_path / "beside"
    for folder in (installed, beside):
        folder.mkdir()
        (folder / "twice_there.py").write_text(f"WHERE = {folder.name!r}\n")
    (beside / "task.py").write_text(f"from twice_there import WHERE\nassert WHERE == 'beside', WHERE\n{TASK}")
    (beside / "helper.py").write_text(HELPER)
    monkeypatch.setattr(sys, "path", [str(installed), *sys.path, str(beside)])  # as module_runner.py does it
    monkeypatch.delitem(sys.modules, "helper", raising=False)
    assert load(str(beside / "task.py")).name == str(beside / "task.py")


HELPERS = """
def param_groups(model, decay):
    return list(model.parameters())

def predict(model, batch):
    return model(batch["point"])

def optimizer(model, config):
    return torch.optim.SGD(param_groups(model, 0.1), lr=0.1)

def _unused(model, batch):
    return predict(model, batch)
"""


def test_a_helper_may_have_the_name_of_a_part(station: Any, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(f"{(TASKS / 'learner.py').read_text()}\n{HELPERS}")
    station.ok("run", own, "--name", "helped", "--steps", 1)
    # a file of before the part existed goes on as it was
    copy = station.runs / "helped" / "task.py"
    copy.write_text(copy.read_text() + "\nimages = ['a.png']\ndef schedule(step):\n    return 1.0\n")
    station.ok("eval", "helped")
    own.write_text(copy.read_text().replace("images = ", "pictures = "))
    done = station("run", own, "--steps", 1)
    assert done.returncode == 2 and "does not take (step, total_steps, config)" in done.stderr

"""`train eval` with other data and settings: for one evaluation, and nothing in the run changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.train.conftest import Station

TASK = """
from dataclasses import dataclass
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset

@dataclass
class Settings:
    fold: int = 0
    width: int = 3
    path: str = ""

def datasets(config):
    values = torch.tensor([float(line) for line in (Path(config.data.root) / "values").read_text().split()])
    set = TensorDataset(values[:, None], values)
    return set, TensorDataset(values[config.task.fold:, None], values[config.task.fold:])

def model(config):
    return nn.Sequential(nn.Linear(1, config.task.width), nn.Linear(config.task.width, 1))

def loss(model, batch):
    return (model(batch[0])[:, 0] - batch[1]).square().mean()

def metrics(model, batch):
    return {"mean": batch[1].mean()}
"""


@pytest.fixture(scope="module")
def trained(shared_station: Station) -> Station:
    """With the run `eval-of`, trained on the values 1 to 4; the folder `test` has 10, 20, 30."""
    for name, values in (("train", "1 2 3 4"), ("test", "10 20 30")):
        (shared_station.folder / name).mkdir()
        (shared_station.folder / name / "values").write_text(values)
    (shared_station.folder / "folds.py").write_text(TASK)
    fields = ("--steps", 2, "--batch_size", 4, "--cpu_threads", 1, "--data.root", "train")
    shared_station.ok("run", "folds.py", "--name", "eval-of", *fields)
    return shared_station


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_other_data_and_settings_hold_for_one_evaluation_alone(trained: Station) -> None:
    before = files(trained.run("eval-of").folder)
    done = trained.ok("eval", "eval-of", "--data.root", "test", "--task.fold", 1, "--to", "figures.json")
    told = json.loads((trained.folder / "figures.json").read_text())
    assert (told["samples"], told["eval"]["mean"]) == (2, 25.0)
    assert told["fields"] == {"data.root": str(trained.folder / "test"), "task.fold": "1"}
    assert "2 samples, --data.root" in done.stdout and "--task.fold 1: loss" in done.stdout
    assert not done.stderr, done.stderr
    assert json.loads(trained.ok("eval", "eval-of", "--json").stdout)["eval"]["mean"] == 2.5
    assert files(trained.run("eval-of").folder) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--optim.lr", "1"], "--optim.lr: an evaluation cannot use it"),
        (["--data.name", "MNIST"], "has no effect"),
        (["--task.path", "x"], "has no effect"),
        (["--task.fold", "x"], "--task.fold x"),
        (["--task.fould", "1"], "did you mean task.fold"),
        (["--task.width", "4"], "does not fit the checkpoint"),
        (["--data.root", "nowhere"], "nowhere"),
        (["--to", "figures.txt"], "must end in .json"),
    ],
)
def test_what_an_evaluation_cannot_use_is_refused(trained: Station, arguments: list[str], words: str) -> None:
    done = trained("eval", "eval-of", *arguments)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and words in done.stderr, done.stderr
    assert not done.stdout

"""`train fork --task FILE`: a run continues with edited code, exactly, and says what is not as it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.train.conftest import Station
from train.run import states

pytestmark = [pytest.mark.never_forgiven, pytest.mark.turns]

TASK = """
from dataclasses import dataclass
import torch
from helper import scale
from torch import nn
from torch.utils.data import TensorDataset

@dataclass
class Settings:
    width: int = 8
    old: float = 0.5

DEFAULTS = {"optim.lr": 0.01, "optim.name": "sgd"}

def datasets(config):
    x = torch.randn(96, 4)
    return TensorDataset(x, x.sum(1, keepdim=True)), None

def model(config):
    return nn.Sequential(nn.Linear(4, config.task.width), nn.Dropout(0.5), nn.Linear(config.task.width, 1))

def loss(model, batch):
    return scale * (model(batch[0]) - batch[1]).square().mean()
"""
FIELDS = ("--steps", 12, "--batch_size", 32, "--checkpoint.every_steps", 4, "--checkpoint.keep", 9, "--cpu_threads", 1)


@pytest.fixture(scope="module")
def edits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Station]:
    """With the finished run `of` of net.py, of two ranks, which has checkpoints of steps 4, 8 and 12."""
    made = Station(tmp_path_factory.mktemp("edits"))
    write(made.folder)
    made.ok("run", "net.py", "--name", "of", "--spawn", 2, *FIELDS)
    yield made
    made.close()


def write(folder: Path, scale: float = 1.0, *changes: tuple[str, str]) -> None:
    """Write the task and its module, with these replacements in the task."""
    text = TASK
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "net.py").write_text(text)
    (folder / "helper.py").write_text(f"scale = {scale}\n")


def digest(station: Station, name: str) -> str:
    record = station.record(name)
    assert record["state"] == states.FINISHED, record
    return str(record["weights_sha256"])


def test_the_same_code_ends_as_its_run_and_edited_code_survives_a_kill(edits: Station) -> None:
    write(edits.folder)
    edits.ok("fork", "of", "--name", "same", "--task", "net.py", "--checkpoint", 4, "--follow")
    assert digest(edits, "same") == digest(edits, "of")
    assert edits.record("same")["forked_from"]["edited"] == []
    write(edits.folder, 0.5, ("old: float = 0.5", "new: float = 2.0"), ('"optim.lr": 0.01', '"optim.lr": 0.05'))
    said = edits("resume", "of", "--steps", 12, "--follow").stderr
    assert f"to use the new version: train fork of --name NEW --task {edits.folder / 'net.py'}" in said
    done = edits.ok("fork", "of", "--name", "b", "--task", "net.py", "--checkpoint", 4, "--follow")
    for line in ("task.old = 0.5 of of is dropped", "task.new = 2.0 is new", "optim.lr stays 0.01"):
        assert line in done.stderr, done.stderr
    assert digest(edits, "b") not in (digest(edits, "of"), digest(edits, "same"))
    fork = ("fork", "of", "--name", "killed", "--task", "net.py", "--checkpoint", 4, "--follow")
    edits(*fork, env={"TRAIN_FAULT": "decided"})
    edits.wait_for_end("killed")
    write(edits.folder, 9.0)  # a resume uses the copies of the fork
    edits.ok("resume", "killed", "--follow")
    assert digest(edits, "killed") == digest(edits, "b")
    edits.ok("fork", "b", "--name", "c", "--checkpoint", 8, "--follow")
    assert digest(edits, "c") == digest(edits, "b")
    shown = " ".join(edits.ok("show", "c").stdout.split())
    assert "forked from b after step 8; b from of after step 4, other code than of: net.py, helper.py" in shown
    ancestry = edits.record("c")["forked_from"]
    assert ancestry["task_sha256"] == edits.record("b")["task_sha256"]
    assert ancestry["forked_from"]["task_sha256"] == edits.record("of")["task_sha256"]


def test_without_a_checkpoint_a_fork_starts_at_step_0_like_a_launch(station: Station) -> None:
    write(station.folder, 1.0, ("return scale", "raise ValueError('a bug')\n    return scale"))
    station("launch", "net.py", "--name", "of", *FIELDS, "--follow")
    write(station.folder)
    done = station.ok("fork", "of", "--name", "mended", "--task", "net.py", "--follow")
    assert "mended starts at step 0: of has no checkpoint" in done.stderr
    station.ok("run", "net.py", "--name", "fresh", *FIELDS)
    assert digest(station, "mended") == digest(station, "fresh")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            ("nn.Linear(4, config.task.width)", "nn.Linear(4, 5), nn.Linear(5, config.task.width)"),
            "2.bias is not in the model",
        ),
        (("nn.Dropout(0.5)", "nn.LayerNorm(8)"), "1.weight"),
        (("width: int = 8", "width: str = 'x'"), "task.width = 8"),
        (("width: int = 8", "depth: int\n    width: int = 8"), "task.depth has no default; set it with"),
        (("def loss", "def los"), "no function loss"),
    ],
)
def test_code_that_does_not_fit_is_refused_in_one_line(edits: Station, change: tuple[str, str], words: str) -> None:
    write(edits.folder, 1.0, change)
    done = edits("fork", "of", "--name", "no", "--task", "net.py", "--steps", 16)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and words in done.stderr, done.stderr
    assert not edits.run("no").folder.exists()


def test_other_data_and_optimizer_arguments_of_the_new_code_hold_and_are_told(edits: Station) -> None:
    groups = "\ndef optimizer(model, config):\n    return torch.optim.SGD(model.parameters(), 0.01, momentum={})\n"
    write(edits.folder, 1.0, ("randn(96", "randn(80"), ("\ndef loss", groups.format(0.5) + "\ndef loss"))
    done = edits.ok("fork", "of", "--name", "d", "--task", "net.py", "--checkpoint", 4, "--follow")
    assert "the data are not those of of: " in done.stderr
    assert "the optimizer takes momentum, weight_decay from net.py" in done.stderr
    manifest = json.loads((edits.run("d").checkpoint(4) / "manifest.json").read_text())
    assert manifest["changed"] == ["momentum", "weight_decay"]
    assert edits.record("d")["samples"] == 80
    edits.ok("resume", "d", "--steps", 14, "--follow")

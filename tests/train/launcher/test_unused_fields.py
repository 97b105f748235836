"""A field that changes nothing in a run is refused where a request sets it, and nothing is created."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.train.conftest import Station
from train.errors import Refused
from train.launcher.checks import prepare
from train.launcher.request import Request

pytestmark = pytest.mark.turns

TASK = """
import dataclasses
import torch
from torch import nn
from torch.utils.data import TensorDataset

@dataclasses.dataclass
class Settings:
    width: int = 1
    forgotten: int = 1

DEFAULTS = {"batch_size": 4, "steps": 2, "optim.weight_decay": 0.3, "cpu_threads": 1, "log.tensorboard": False}

def datasets(config): return TensorDataset(torch.ones(20, 5)), None
def model(config): return nn.Linear(5, config.task.width)
def loss(model, batch): return model(batch[0]).square().mean()
"""
OPTIMIZER = "def optimizer(model, config): return torch.optim.SGD(model.parameters(), lr=1e-3)\n"
UPDATES = """
def updates(model, config):
    return {"a": {"loss": lambda m, b: m(b[0]).square().mean(), "optimizer": torch.optim.SGD(model.parameters(), 1e-3)}}
"""
READS = OPTIMIZER.replace("1e-3", "config.optim.lr")
BRANCH = """
def optimizer(model, config):
    if config.optim.name == "sgd":
        return torch.optim.SGD(model.parameters(), config.optim.lr, momentum=config.optim.momentum)
    return torch.optim.AdamW(model.parameters(), config.optim.lr)
"""
KEEPS = """
class Net(nn.Linear):
    def __init__(self, config):
        super().__init__(5, 1)
        self.settings = config
def model(config): return Net(config)
"""
SCHEDULE = "def schedule(step, total_steps, config): return 1.0\n"


@pytest.mark.parametrize(
    ("more", "flags", "words"),
    [
        (OPTIMIZER, {"optim.lr": "0.1"}, "optimizer() in {} replaces --optim.lr 0.1; read config.optim.lr"),
        (OPTIMIZER, {"optim.lr": "0.001"}, "--optim.lr 0.001"),  # as it is anyway: a sweep comes by it
        (OPTIMIZER, {"optim.weight_decay": "0"}, "--optim.weight_decay 0"),
        (OPTIMIZER, {"optim.name": "sgd"}, "--optim.name sgd"),
        (OPTIMIZER, {"optim.args.eps": "1"}, "--optim.args.eps 1"),
        (READS, {"optim.momentum": "0.5"}, "--optim.momentum 0.5"),
        (READS, {"optim.lr": "0.5"}, ""),
        (OPTIMIZER.replace("lr=1e-3", "1e-3, momentum=config.optim.momentum"), {"optim.momentum": "0.5"}, ""),
        (BRANCH, {"optim.momentum": "0.5"}, ""),  # a sweep over optim.name
        (OPTIMIZER.replace("1e-3", "[*vars(config.optim).values()][1]"), {"optim.weight_decay": "0"}, ""),
        (OPTIMIZER + KEEPS, {"optim.lr": "0.5"}, ""),  # its forward may read the field
        ("", {"optim.momentum": "0.9"}, "without --optim.name sgd; other optimizers take --optim.args.betas '[0.9"),
        (UPDATES, {"optim.lr": "0.5"}, "updates() in {} replaces --optim.lr 0.5"),
        (OPTIMIZER, {"schedule.decay": "linear", "clip_grad_norm": "1"}, ""),
        (SCHEDULE, {"schedule.decay_share": "0.3"}, "schedule() in {} replaces --schedule.decay_share 0.3"),
        (SCHEDULE.replace("1.0", "config.schedule.gamma"), {"schedule.gamma": "0.3"}, ""),
        ("", {"schedule.gamma": "0.3"}, "--schedule.gamma 0.3 has no effect without --schedule.decay step"),
        ("", {"schedule.gamma": "0.3", "schedule.decay": "step"}, ""),
        ("", {"schedule.min_factor": "0.3", "schedule.decay": "constant"}, "--schedule.min_factor 0.3"),
        ("", {"schedule.base_batch_size": "32"}, "without --schedule.scaling linear"),
        ("", {"parallel.find_unused_parameters": "true", "parallel.strategy": "single"}, "strategy ddp or auto"),
        ("", {"parallel.wrap": "auto"}, "without --parallel.strategy fsdp or hsdp or --compile blocks; give both"),
        ("", {"parallel.wrap": "Block", "compile": "true"}, "is for fsdp and hsdp, or --compile blocks, not auto"),
        ("", {"compile": "blocks"}, "the model has no repeated blocks"),
        ("", {"parallel.wrap": "Block", "compile": "blocks"}, "the model has no module of that class"),
        ("", {"parallel.find_unused_parameters": "true"}, ""),  # the same line on one rank and on many
        ("", {"ema.warmup": "10"}, "without --ema.decay"),
        ("", {"watch.healthy_minutes": "3"}, "--script"),
        ("", {"eval.every_steps": "5"}, "--eval.every_steps 5 has no effect, because datasets() in {} returns None"),
        ("", {"eval.every_epochs": "0", "ema.warmup": "0", "init_skip": ""}, ""),  # off is off
        ("", {"data.root": "/"}, "{} does not read config.data.root"),
        ("", {"data.name": "MNIST"}, "{} does not read config.data.name"),
        ("", {"log.mfu": "true"}, "--log.mfu true has no effect without --device cuda"),
        ("", {"task.forgotten": "3"}, "{} does not read config.task.forgotten of its Settings"),
        ("", {"task.width": "3"}, ""),
    ],
)  # fmt: skip
def test_what_has_no_effect_is_refused(tmp_path: Path, more: str, flags: dict[str, str], words: str) -> None:
    task = tmp_path / "task.py"
    text = TASK.replace("def loss", "def _loss") if "def updates" in more else TASK
    task.write_text(text + more)
    request = Request(task=str(task), flags={"device": "cpu"} | flags)
    if not words:
        prepare(request)
        return
    with pytest.raises(Refused) as refused:
        prepare(request)
    assert words.format(task) in str(refused.value)


def test_a_file_is_held_to_it_where_it_changes_something_and_defaults_are_not(tmp_path: Path) -> None:
    task, file = tmp_path / "task.py", tmp_path / "shared.toml"
    task.write_text(TASK + OPTIMIZER)
    file.write_text('[optim]\nweight_decay = 0.3\nname = "adamw"\n[early_stopping]\npatience = 3\n[ema]\nwarmup = 0\n')
    found = prepare(Request(task=str(task), flags={}, config_file=str(file)))
    assert {"optim.lr", "optim.name", "optim.weight_decay"} <= {*found.record["unused_fields"]}
    file.write_text('[early_stopping]\nmetric = "loss"\npatience = 3\n[ema]\ndecay = 0.9\nwarmup = 3\n')
    prepare(Request(task=str(task), flags={"early_stopping.metric": "", "ema.decay": "none"}, config_file=str(file)))
    file.write_text("[ema]\nwarmup = 3\n")
    with pytest.raises(Refused, match=r"^ema.warmup = 3 in .*shared.toml has no effect without --ema.decay"):
        prepare(Request(task=str(task), flags={}, config_file=str(file)))
    file.write_text("[optim]\nlr = 0.3\n")
    with pytest.raises(Refused, match=r"replaces optim.lr = 0.3 in .*shared.toml"):
        prepare(Request(task=str(task), flags={}, config_file=str(file)))
    prepare(Request(task="digits", flags={}, config_file=str(file)))


def test_no_command_creates_anything_and_ls_shows_no_value_that_is_not_used(station: Station) -> None:
    (station.folder / "own.py").write_text(TASK + OPTIMIZER)
    slurm = ("--on", "slurm", "--gpus-per-node", 1, "--dry-run")
    for command in (("run", "own.py"), ("launch", "own.py"), ("submit", "own.py", *slurm)):
        refused = station(*command, "--optim.lr", 0.1)
        assert refused.returncode == 2 and "replaces --optim.lr 0.1" in refused.stderr, refused.stderr
    assert not station.runs.exists()
    station.ok("run", "own.py", "--name", "own", "--checkpoint.every_steps", 1)
    for command in (("fork", "own", "--name", "no"), ("resume", "own", "--steps", 4)):
        assert station(*command, "--optim.lr", 0.1).returncode == 2
    station.ok("fork", "own", "--name", "yes", "--steps", 4, "--follow")
    (station.folder / "plain.py").write_text(TASK)
    station.ok("run", "plain.py", "--name", "plain", "--optim.lr", 0.1)
    lines = station.ok("ls", "--csv", "--columns", "name,optim.lr,batch_size", "--sort", "name").stdout.splitlines()[1:]
    assert lines == ["own,,4", "plain,0.1,4", "yes,,4"]
    listed: list[dict[str, Any]] = json.loads(station.ok("ls", "own", "--json").stdout)
    assert "optim.lr" not in listed[0]["config"] and listed[0]["config"]["batch_size"] == 4
    assert "warning" not in station.logs("yes").partition("moved")[0]


def test_what_nothing_calls_is_named_by_run_and_launch_and_in_the_log(station: Station) -> None:
    (station.folder / "odd.py").write_text(TASK + "CONFIG = {'optim.lr': 3}\ndef training_step(model, batch): ...\n")
    for command, name in (("run", "here"), ("launch", "there")):
        done = station.ok(command, "odd.py", "--name", name)
        assert (
            "odd.py: neither the task nor the engine uses CONFIG (DEFAULTS here), training_step (loss here)"
            in done.stderr
        )
        station.wait_for_end(name)
        assert "uses CONFIG" in station.record(name)["warnings"][0]
    assert "warning: " in station.logs("there")

"""Weights that may have been trained on the evaluation samples of a new run: its launch says so."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from train.errors import Refused
from train.launcher.checks import prepare
from train.launcher.fork import prepare_fork
from train.launcher.request import Request

if TYPE_CHECKING:
    from conftest import Station

TASK = """
import torch
from torch.utils.data import TensorDataset, random_split
def datasets(config):
    return random_split(TensorDataset(torch.arange(60.0)[:, None], torch.zeros(60, 1)), [0.8, 0.2])
def model(config): return torch.nn.Linear(1, 1)
def loss(model, batch): return (model(batch[0]) - batch[1]).square().mean()
"""
OWN = TASK.replace("[0.8, 0.2]", "[0.8, 0.2], torch.Generator().manual_seed(config.seed)")
FIXED = TASK.replace("[0.8, 0.2]", "[0.8, 0.2], torch.Generator().manual_seed(7)")
KEEP = "evaluation samples may have been trained on by a; keep its split: --data.seed 0"


def test_weights_of_another_split_are_named_wherever_they_come_from(station: Station) -> None:
    for name, text in (("task", TASK), ("own", OWN), ("fixed", FIXED), ("half", TASK.replace("60.0", "30.0"))):
        (station.folder / f"{name}.py").write_text(text.replace("zeros(60", f"zeros({30 if name == 'half' else 60}"))
    for name, task in (("a", "task"), ("c", "own"), ("d", "fixed")):
        station.ok("run", f"{task}.py", "--name", name, "--steps", 1, "--cpu_threads", 1, "--optim.lr", 1e-6)
    for file in ("a.pt", "a.safetensors"):
        station.ok("export", "a", "--to", file)
    checkpoint = str(station.run("a").checkpoint(1))
    station.ok("run", "task.py", "--name", "b", "--init", "a", "--steps", 1, "--cpu_threads", 1)

    def told(task: str, init: str | Path, **flags: str) -> list[str]:
        fields = {"init": str(init), **{name.replace("__", "."): value for name, value in flags.items()}}
        plan = prepare(Request(str(station.folder / f"{task}.py"), flags=fields), runs=station.runs)
        return [line for line in plan.warnings if "trained on" in line]

    for source in (checkpoint, station.folder / "a.pt", station.folder / "a.safetensors"):
        assert told("task", source, seed="1") == told("task", source, data__seed="1") == [KEEP]
        assert told("task", source, seed="1", data__seed="0") == told("task", source) == []
    assert told("task", station.run("b").checkpoint(1), seed="1")[0].startswith("evaluation samples may have been")
    own, fixed = station.run("c").checkpoint(1), station.run("d").checkpoint(1)
    for flags in ({"seed": "1"}, {"seed": "1", "data__seed": "0"}):
        assert "let datasets() in own.py read config.data.seed, not config.seed" in told("own", own, **flags)[0]
    assert told("fixed", fixed, seed="1") == told("half", checkpoint, seed="1") == []

    # a fork keeps the split, and refuses another one
    fork = prepare_fork(station.run("a"), 1, {"seed": "2", "steps": "2"}, 1)
    assert "\nseed = 0\n" in str(fork.files["config.toml"]).partition("[data]")[2]
    with pytest.raises(Refused, match=r"may have been trained on; keep its split: --data.seed 0$"):
        prepare_fork(station.run("a"), 1, {"data.seed": "2", "steps": "2"}, 1)
    with pytest.raises(Refused, match=r"reads config.seed, .* let it read config.data.seed"):
        prepare_fork(station.run("c"), 1, {"seed": "2", "steps": "2"}, 1)

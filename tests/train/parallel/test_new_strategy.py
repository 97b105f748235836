"""A strategy is one file and one line, as docs/contributing.md says: ddp under another name, in a copy of train/."""

from __future__ import annotations

import inspect
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.train.conftest import Station
from train import config
from train.config import Config, Parallel, strategies
from train.parallel import choose
from train.parallel.precision import Precision
from train.parallel.world import World

ROOT = Path(__file__).parents[3]
FILE = '''"""ddp under another name."""

from .ddp import DDP


class Mirror(DDP):
    """Counts its steps, to show that it is what trains."""

    def begin(self, micros: int) -> None:
        super().begin(micros)
        print("mirror begins a step", flush=True)
'''
LINE = '    StrategyInfo("mirror", "mirror:Mirror", fields=("find_unused_parameters",)),\n'
BEFORE = '    StrategyInfo("fsdp",'
"""The line of the table that the new one precedes."""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The folder of a package `train` with the strategy in it."""
    package = tmp_path / "package" / "train"
    shutil.copytree(ROOT / "train", package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "parallel" / "mirror.py").write_text(FILE)
    table = package / "config" / "strategies.py"
    assert BEFORE in table.read_text()
    table.write_text(table.read_text().replace(BEFORE, LINE + BEFORE, 1))
    return package.parent


def train(package: Path, folder: Path, *arguments: object, fault: str = "") -> subprocess.CompletedProcess[str]:
    """Run `train ARGUMENTS` of this package in a folder."""
    environment = Station(folder).environment() | {"PYTHONPATH": str(package), "TRAIN_FAULT": fault}
    return subprocess.run(
        [sys.executable, "-m", "train", *map(str, arguments)],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize("info", strategies.STRATEGIES, ids=lambda info: info.name)
def test_each_line_of_the_table_names_a_class_and_fields_that_exist(info: strategies.StrategyInfo) -> None:
    cpu, ranks = torch.device("cpu"), 1 if info.is_for_one_rank else 2
    ours = Config(parallel=Parallel(strategy=info.name))
    made = choose.make(World(0, size=ranks, local_rank=0, device=cpu), ours, Precision("fp32", cpu))
    assert made.__class__.__name__ == info.made_by.partition(":")[2]
    assert {f"parallel.{field}" for field in info.fields} <= config.fields().keys()
    methods = [name for name in dir(made) if not name.startswith("_") and inspect.ismethod(getattr(made, name))]
    assert len(methods) <= 10, methods


@pytest.mark.minutes
def test_a_strategy_of_one_file_and_one_line_trains_saves_and_resumes(copy: Path, station: Station) -> None:
    flags = ["--spawn", 2, "--steps", 6, "--batch_size", 32, "--cpu_threads", 1]
    flags += ["--checkpoint.every_steps", 3, "--checkpoint.asynchronous", "false"]
    done = train(copy, station.folder, "run", "digits", "--name", "plain", *flags)
    assert done.returncode == 0, done.stderr
    flags += ["--parallel.strategy", "mirror"]
    train(copy, station.folder, "run", "digits", "--name", "mirrored", *flags, fault="step@1:5")
    assert station.run("mirrored").read_effective()["state"] == "interrupted", station.logs("mirrored")
    assert [*station.run("mirrored").steps_saved()] == [3]
    done = train(copy, station.folder, "resume", "mirrored", "--follow")
    assert done.returncode == 0, done.stderr + station.logs("mirrored")
    record, plain = station.record("mirrored"), station.record("plain")
    assert (record["state"], record["step"], record["world_size"]) == ("finished", 6, 2)
    assert [attempt["from_step"] for attempt in record["attempts"]] == [0, 3]
    assert record["weights_sha256"] == plain["weights_sha256"]
    logs = station.logs("mirrored")
    assert "fp32, mirror, continuing after step 3" in logs and "mirror begins a step" in logs, logs


@pytest.mark.minutes
def test_what_asks_the_table_knows_a_strategy_that_was_added(copy: Path, tmp_path: Path) -> None:
    def said(*arguments: object) -> str:
        done = train(copy, tmp_path, *arguments)
        return done.stdout + done.stderr

    assert "auto|single|ddp|mirror|fsdp|hsdp" in said("run", "--help")
    assert "did you mean mirror?" in said("run", "digits", "--parallel.strategy", "miror")
    words = said("run", "digits", "--spawn", 2, "--parallel.strategy", "mirror", "--parallel.wrap", "Linear")
    assert "is for fsdp and hsdp, or --compile blocks, not mirror" in words and not [*tmp_path.glob("runs/*")], words

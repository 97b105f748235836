"""Bits that do not depend on when they are computed; and what is said where torch has no way to such."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.train.specs import with_spec
from tests.train.training import Engine
from train.build import cores, determinism
from train.config import Config
from train.errors import Refused
from train.parallel.torch_private import fix_compiler
from train.trainer.evaluate import evaluate_run

pytestmark = pytest.mark.never_forgiven

if TYPE_CHECKING:
    from conftest import Station

WITHOUT_ORDER = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def datasets(config):
    return TensorDataset(torch.randn(32, 4)), TensorDataset(torch.randn(8, 4))

def model(config):
    return nn.Linear(4, 4)

def loss(model, batch):
    made = model(batch[0])
    spread = torch.zeros(16).put_(torch.arange(16), made.flatten()[:16])  # has no deterministic way, on a CPU neither
    return made.square().mean() + spread.sum()
"""


@pytest.fixture
def task(tmp_path: Path) -> Path:
    file = tmp_path / "spread.py"
    file.write_text(WITHOUT_ORDER)
    return file


def test_an_operation_without_an_order_fails_in_a_line_with_its_remedy(engine: Engine, task: Path) -> None:
    with pytest.raises(Refused, match=r"^put_ has no deterministic implementation.*--deterministic false"):
        engine.run("looked-at", task=task, steps=4, epochs=None)
    record = engine.run("unordered", task=task, steps=4, epochs=None, eval__first="false")
    assert (record["state"], engine.code) == ("failed", 3)
    assert record["reason"].startswith("put_ has no deterministic implementation") and "\n" not in record["reason"]
    assert "--deterministic false" in record["reason"]
    assert "Traceback" not in engine.said("unordered")


def test_with_the_remedy_it_trains_and_an_evaluation_alone_is_as_strict_as_training(engine: Engine, task: Path) -> None:
    record = engine.run("freed", task=task, steps=4, epochs=None, deterministic="false")
    assert record["state"] == "finished"
    run = engine.station.run("freed")
    assert evaluate_run(*with_spec(run), None)[2] == record["metrics"]
    settings = run.folder / "config.toml"
    settings.write_text(settings.read_text().replace("deterministic = false", "deterministic = true"))
    done = engine.station("eval", "freed")
    assert done.returncode == 2 and "--deterministic false" in done.stderr and "Traceback" not in done.stderr


@pytest.fixture
def own_arithmetic() -> Any:
    kept = (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark, torch.get_num_threads())
    yield
    torch.use_deterministic_algorithms(kept[0])
    torch.backends.cudnn.benchmark = kept[1]
    torch.set_num_threads(kept[2])


@pytest.mark.usefixtures("own_arithmetic")
def test_strict_fills_nothing_and_tries_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    determinism.set_determinism(Config(cpu_threads=1))
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory and not torch.backends.cudnn.benchmark
    determinism.set_determinism(Config(cpu_threads=1, deterministic=False))
    assert not torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.benchmark


TIMED = {"dynamic_scale_rblock": False, "shape_padding": False, "deterministic": True}
"""What Inductor, as torch ships it, decides by how long something takes (the last is of torch 2.9 on)."""


@pytest.mark.parametrize("deterministic", [True, False])
def test_compiled_nothing_is_decided_by_its_time(deterministic: bool) -> None:
    from torch._inductor import config as inductor

    known = [name for name in TIMED if hasattr(inductor, name)]
    assert "shape_padding" in known
    with inductor.patch({name: not TIMED[name] for name in known}):
        fix_compiler(True, deterministic)
        assert all((getattr(inductor, name) is TIMED[name]) == deterministic for name in known)


@pytest.mark.usefixtures("own_arithmetic")
@pytest.mark.parametrize(("given", "taken"), [(":0:0", ":4096:8"), (":16:8", ":16:8")])
def test_cublas_gets_a_setting_with_which_it_is_deterministic(
    monkeypatch: pytest.MonkeyPatch, given: str, taken: str
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", given)
    determinism.set_determinism(Config(cpu_threads=1))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == taken


def test_other_errors_have_no_such_remedy() -> None:
    assert determinism.refusal(RuntimeError("CUDA error: an illegal memory access was encountered")) == ""
    assert determinism.refusal(ValueError("put_ does not have a deterministic implementation")) == ""


SHORT = ["--steps", 2, "--log.tensorboard", "false"]


def recorded(station: Station, name: str) -> int:
    return int(tomllib.loads((station.runs / name / "config.toml").read_text())["cpu_threads"])


@pytest.mark.minutes
def test_what_the_user_sets_wins_and_a_resume_keeps_it(station: Station) -> None:
    done = station.ok("run", "digits", "--name", "omp", *SHORT, env={"OMP_NUM_THREADS": "3"})
    assert recorded(station, "omp") == 3 and "3 CPU threads a rank (by OMP_NUM_THREADS)" in done.stderr
    station.ok("run", "digits", "--name", "flag", "--cpu_threads", 1, *SHORT, env={"OMP_NUM_THREADS": "3"})
    assert recorded(station, "flag") == 1
    station.ok("resume", "omp", "--steps", 4, "--follow", env={"OMP_NUM_THREADS": "1"})
    assert recorded(station, "omp") == 3


@pytest.mark.parametrize(
    ("omp", "device", "inputs", "expected"),
    [("3", "cpu", 10, 3), ("4,2", "cpu", 10, 4), ("many", "cpu", 10, 1), ("0", "cpu", 1000, 4), (None, "cpu", 10, 1),
     (None, "cpu", 1000, 4), (None, "cuda", 10, 4)],
)  # fmt: skip
def test_a_small_model_takes_one_thread_and_another_its_share(
    monkeypatch: pytest.MonkeyPatch, omp: str | None, device: str, inputs: int, expected: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if omp is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", omp)
    monkeypatch.setattr(cores, "usable", lambda: 8.5)
    assert cores.default_threads(2, torch.device(device), nn.Linear(inputs, 100))[0] == expected

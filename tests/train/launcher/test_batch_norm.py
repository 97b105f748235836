"""A run whose BatchNorm would meet a micro batch of one sample is refused at once, if torch would fail."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from train.data.plan import Plan
from train.errors import Refused
from train.launcher.batch_norm import first_alone
from train.launcher.checks import prepare
from train.launcher.request import Request

if TYPE_CHECKING:
    from conftest import Station

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
def datasets(config):
    x = torch.randn(33, 2, 4, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.mean((1, 2, 3)).unsqueeze(1)), None
class Frozen(nn.BatchNorm1d):
    def train(self, mode=True):
        return super().train(False)
class Model(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.leave = norm, nn.Linear({width}, 1)
    def forward(self, x):
        return self.leave(self.norm(x).flatten(1))
def model(config):
    return Model(nn.Sequential({norm}))
def loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])
"""
FLAT = ("nn.Flatten(), nn.BatchNorm1d(32)", 32)
POOLED = ("nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(2)", 2)
FLAGS = {"batch_size": "16", "cpu_threads": "1", "device": "cpu"}


def written(folder: Path, norm: str, width: int) -> Path:
    task = folder / "task.py"
    task.write_text(TASK.replace("{norm}", norm).replace("{width}", str(width)))
    return task


@pytest.mark.parametrize(
    ("norm", "flags", "ranks", "said"),
    [
        (
            FLAT,
            {},
            1,
            r"such a micro batch \(1 sample in its batch\); use --data\.drop_last true, or another --batch_size$",
        ),
        (FLAT, {}, 3, "and step 3 has such a micro batch"),
        (POOLED, {"precision": "fp64"}, 1, "and step 3 has such a micro batch"),
        (FLAT, {"batch_size": "10"}, 2, ""),  # 3 samples at the end: 2 and 1 on two ranks, by default in one piece
        (FLAT, {"batch_size": "10", "micro_batch_size": "2"}, 2, r"3 samples in its batch, at most 2 in a micro batch"),
        (
            FLAT,
            {"batch_size": "2"},
            2,
            "step 1 has .* use another --batch_size, or .*--micro_batch_size, or fewer ranks",
        ),
        (FLAT, {"steps": "2"}, 1, ""),
        (FLAT, {"data.drop_last": "true"}, 2, ""),
        (("nn.BatchNorm2d(2)", 32), {}, 1, ""),  # of 4x4 values a channel
        (("nn.Flatten(), Frozen(32)", 32), {}, 1, ""),
        (FLAT, {"freeze": "norm.*"}, 1, ""),
        (("nn.Flatten(), nn.LayerNorm(32)", 32), {}, 1, ""),
    ],
)
def test_a_launch_is_refused_where_torch_would_fail(
    tmp_path: Path, norm: tuple[str, int], flags: dict[str, str], ranks: int, said: str
) -> None:
    request = Request(str(written(tmp_path, *norm)), flags=FLAGS | flags)
    if not said:
        assert prepare(request, ranks=ranks).record["samples"] == 33
        return
    with pytest.raises(Refused, match=f"^BatchNorm cannot train on one sample.*{said}"):
        prepare(request, ranks=ranks)


def test_a_resume_and_a_fork_are_refused_with_what_goes_on(station: Station) -> None:
    written(station.folder, *FLAT)
    station.ok("run", "task.py", "--name", "a", "--steps", 2, "--batch_size", 16)
    refused = station("resume", "a", "--steps", 4)
    assert refused.returncode == 2
    assert "BatchNorm" in refused.stderr
    assert "train fork a --name NEW --steps 4 --data.drop_last true" in refused.stderr
    assert station("fork", "a", "--name", "b", "--steps", 4).returncode == 2
    assert [path.name for path in station.runs.iterdir()] == ["a"]
    station.ok("fork", "a", "--name", "b", "--steps", 4, "--data.drop_last", "true", "--follow")


def test_the_first_step_with_a_single_sample_is_found_from_any_step_on() -> None:
    whole, even = (
        Plan(length=33, batch_size=16, micro_batch_size=5, drop_last=True),
        Plan(length=33, batch_size=16, micro_batch_size=5, is_even=True),
    )
    for plan in (
        Plan(length=33, batch_size=16, micro_batch_size=16),
        Plan(length=33, batch_size=16, micro_batch_size=15),
        Plan(length=5, batch_size=16, micro_batch_size=4),
        Plan(length=33, batch_size=11, micro_batch_size=10),
        whole,
        even,
    ):
        for first in range(8):
            steps = range(first, 9)
            assert first_alone(plan, steps) == next((step for step in steps if plan.smallest(step) == 1), None)

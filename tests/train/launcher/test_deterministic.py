"""A run on GPUs is refused at once if its first step needs an operator that has no deterministic implementation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from train import gpus
from train.errors import Refused
from train.gpus import Card
from train.launcher.checks import prepare
from train.launcher.request import Request

TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
def datasets(config):
    return TensorDataset(torch.zeros(16, 3, 8, 8), torch.zeros(16, 8, 8, dtype=torch.long)), None
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.pool, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.AdaptiveAvgPool2d(2), nn.Linear(16, 2)
    def forward(self, x):
        return {forward}
def model(config):
    return Model()
def loss(model, batch):
    x, wanted = batch
    return {loss}
"""
POOLED, PLAIN = "self.last(self.pool(self.first(x)).flatten(1))", "self.first(x)"
MEAN, PIXELS = "model(x).mean()", "F.cross_entropy(model(x), wanted)"
POOL, PIXEL = "AdaptiveAvgPool1d or AdaptiveAvgPool2d to more than one value", "cross_entropy or nll_loss of each pixel"
FLAGS = {"batch_size": "4", "cpu_threads": "1", "data.workers": "0"}


@pytest.mark.parametrize(
    ("forward", "loss", "flags", "said"),
    [
        (POOLED, MEAN, {}, POOL),
        (POOLED, MEAN, {"freeze": "first.*"}, ""),  # no gradient goes through the pool
        (POOLED, MEAN, {"deterministic": "false"}, ""),
        (POOLED, MEAN, {"device": "cpu"}, ""),
        (POOLED, MEAN, {"compile": "true"}, ""),  # it has kernels of its own
        (PLAIN, MEAN, {}, ""),  # the pool is there and not used
        ("F.adaptive_avg_pool2d(self.first(x), 1)", MEAN, {}, ""),  # a mean
        ("F.adaptive_avg_pool2d(self.first(x), 3)", MEAN, {}, POOL),
        ("F.interpolate(self.first(x), scale_factor=2, mode='bicubic')", MEAN, {}, "bicubic interpolation"),
        ("F.interpolate(self.first(x), scale_factor=2, mode='bilinear')", MEAN, {}, ""),
        (PLAIN, PIXELS, {}, PIXEL),
        (PLAIN, "F.cross_entropy(model(x), wanted, reduction='none').mean()", {}, ""),
        (PLAIN, f"model(x).mean() if model(x).sum().item() > 9 else {PIXELS}", {}, ""),  # only values tell
    ],
)
def test_a_launch_is_refused_where_the_first_step_would_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forward: str, loss: str, flags: dict[str, str], said: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(gpus, "cards", lambda: [Card("NVIDIA H100", (9, 0))])
    monkeypatch.setattr(torch, "__version__", "2.7.1")
    task = tmp_path / "task.py"
    task.write_text(TASK.replace("{forward}", forward).replace("{loss}", loss))
    request = Request(task=str(task), flags=FLAGS | flags)
    if not said:
        assert prepare(request).record["samples"] == 16
        return
    with pytest.raises(Refused, match=f"{said}.* has no deterministic implementation .*--deterministic false"):
        prepare(request)


def test_nothing_is_refused_on_a_torch_that_nobody_has_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch, "__version__", "2.14.0")
    task = tmp_path / "task.py"
    task.write_text(TASK.replace("{forward}", POOLED).replace("{loss}", MEAN))
    assert prepare(Request(task=str(task), flags=FLAGS)).record["samples"] == 16

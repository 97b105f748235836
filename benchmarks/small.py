"""The task of `python -m benchmarks.loop`: one model and loss for all loops, and marks that record the cost of steps.

A mark is set where the loss is called, at several steps of the same run, so that starting and ending are not in their
differences.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

DEFAULTS = {"batch_size": 64, "optim.name": "sgd", "optim.lr": 0.05, "optim.momentum": 0, "optim.weight_decay": 0}


What = Literal["mlp", "resnet18"]


@dataclass
class Settings:
    what: What = "mlp"
    """A perceptron 64-256-10 on scans of digits, or a ResNet-18 on noise of 3 x 64 x 64."""
    first: int = 1000
    """The step after which the first mark is set."""
    stride: int = 2000
    """Number of steps from a mark to the next."""
    marks: int = 5
    """Number of marks."""
    file: str = ""
    """The file that the marks are written to."""


class _Marks:
    """CPU time of this process and all its threads, in seconds, and its memory, in bytes, after some steps."""

    def __init__(self, settings: Any) -> None:
        self._settings, self._step, self._next = settings, -1, settings.first
        self._found: list[tuple[float, int]] = []

    def pass_by(self) -> None:
        """Call when a loss is about to be computed; the first time after step 0."""
        self._step += 1
        if self._step == self._next:
            self._next += self._settings.stride
            self._found.append((time.process_time(), psutil.Process().memory_info().rss))
            if len(self._found) == self._settings.marks:
                Path(self._settings.file).write_text(json.dumps(self._found))


_state: dict[str, _Marks] = {}


def datasets(config: Any) -> tuple[TensorDataset, None]:
    _state["marks"] = _Marks(config.task)
    if config.task.what == "resnet18":
        return TensorDataset(torch.randn(256, 3, 64, 64), torch.randint(10, (256,))), None
    from train.tasks import digits

    scans, _ = digits.datasets(argparse.Namespace(task=digits.Settings(shift=0)))
    return TensorDataset(scans.images.flatten(1), scans.digits), None


def model(config: Any) -> nn.Module:
    if config.task.what == "resnet18":
        from torchvision.models import resnet18

        return resnet18(num_classes=10)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def loss(model: nn.Module, batch: Any) -> Tensor:
    _state["marks"].pass_by()
    inputs, classes = batch
    return cross_entropy(model(inputs), classes)

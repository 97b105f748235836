"""Images made on the fly, for trying a machine without data: any size, any number, nothing on disk.

    train launch fake --task.size 224 --task.model resnet50 --nproc auto

Each class is a colour with noise over it, so the loss falls as in real training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ..config import Count
from .images import loss, metrics, network  # noqa: F401 - the first two are functions of this task too

DEFAULTS = {"epochs": 1}


@dataclass
class Settings:
    size: Count = 32
    """Height and width of an image in pixels."""
    classes: Count = 10
    """Number of classes."""
    count: Count = 2048
    """Images in the training set; the evaluation set has an eighth of it."""
    model: str = "small"
    """small, or the name of a torchvision classification model, for example resnet18."""


class Noise(Dataset[tuple[Tensor, int]]):
    """Image `index` is a function of `index`: the same in every epoch and process."""

    def __init__(self, count: int, size: int, classes: int, first: int) -> None:
        self.count, self.size, self.classes, self.first = count, size, classes, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label = (self.first + index) % self.classes
        own = torch.Generator().manual_seed(self.first + index)
        colour = torch.rand(3, 1, 1, generator=torch.Generator().manual_seed(label))
        return colour + 0.5 * torch.randn(3, self.size, self.size, generator=own), label


def datasets(config: Any) -> tuple[Noise, Noise]:
    task = config.task
    return (
        Noise(task.count, task.size, task.classes, 0),
        Noise(max(task.count // 8, 1), task.size, task.classes, task.count),
    )


def model(config: Any) -> nn.Module:
    return network(config.task.model, config.task.classes)

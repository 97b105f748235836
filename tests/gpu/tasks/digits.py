"""A small convolutional network with dropout and augmentation on made-up scans of 8x8 pixels.

The shape of the built-in task digits, whose data come with scikit-learn: that need not be here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


@dataclass
class Settings:
    count: int = 1797


class Scans(Dataset[tuple[Tensor, int]]):
    def __init__(self, count: int) -> None:
        self.digits = torch.arange(count) % 10
        shapes = torch.rand(10, 1, 8, 8)
        self.images = shapes[self.digits] + 0.3 * torch.rand(count, 1, 8, 8)

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        y, x = torch.randint(3, (2,)).tolist()
        return nn.functional.pad(self.images[index], [1] * 4)[:, y : y + 8, x : x + 8], int(self.digits[index])


def datasets(config: Any) -> tuple[Scans, Scans]:
    return Scans(config.task.count), Scans(96)


def model(config: Any) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2),
        nn.Linear(64 * 16, 10),
    )  # fmt: skip


def loss(model: nn.Module, batch: Any) -> Tensor:
    images, digits = batch
    return nn.functional.cross_entropy(model(images), digits)


def metrics(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    images, digits = batch
    return {"accuracy": (model(images).argmax(1) == digits).double().mean()}

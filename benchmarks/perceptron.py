"""A task for benchmarks.recovery: a perceptron with dropout on random points, of some ten milliseconds a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

WIDTH = 1024


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Points and their labels, the same in every process."""

    def __init__(self, count: int = 8192) -> None:
        generator = torch.Generator().manual_seed(0)
        self.points = torch.randn(count, 64, generator=generator)
        self.labels = (self.points[:, :10] + self.points[:, 10:20]).argmax(1)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.labels[index]


def datasets(config: Any) -> tuple[Points, None]:
    return Points(), None


def model(config: Any) -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, WIDTH), nn.ReLU(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
    )


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

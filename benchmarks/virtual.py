"""A task for benchmarks: any number of samples that are not stored, and a model that costs next to nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


@dataclass
class Settings:
    samples: int = 1_000_000_000


class Numbers(Dataset[Tensor]):
    """Sample `index` is a number made of it."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index / self.count])


def datasets(config: Any) -> tuple[Numbers, None]:
    return Numbers(config.task.samples), None


def model(config: Any) -> nn.Module:
    return nn.Linear(1, 1)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch.square()).square().mean()

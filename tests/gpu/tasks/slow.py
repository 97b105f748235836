"""Samples that take long to fetch, and a step that takes the device long, each as long as is asked for."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

COUNT = 512


@dataclass
class Settings:
    fetch: float = 0.0
    """Seconds a sample."""
    compute: float = 0.0
    """Seconds a step: of a CPU; of a GPU so many of its cycles."""


class Slow(Dataset[Tensor]):
    def __init__(self, fetch: float) -> None:
        self.fetch = fetch

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.fetch)
        return torch.full((8,), index / COUNT)


def datasets(config: Any) -> tuple[Slow, None]:
    return Slow(config.task.fetch), None


class Busy(nn.Linear):
    def __init__(self, compute: float) -> None:
        super().__init__(8, 1)
        self.compute = compute

    def forward(self, batch: Tensor) -> Tensor:
        if self.training:
            if batch.is_cuda:
                torch.cuda._sleep(int(self.compute))
            else:
                time.sleep(self.compute)
        return super().forward(batch)


def model(config: Any) -> nn.Module:
    return Busy(config.task.compute)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()

"""Samples that take long to fetch, and a step that takes the device long, each as long as is asked for."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


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
        return 512

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.fetch)
        return torch.full((8,), index / 512)


def datasets(config: Any) -> tuple[Slow, None]:
    return Slow(config.task.fetch), None


def model(config: Any) -> nn.Module:
    linear = nn.Linear(8, 1)
    linear.compute = config.task.compute
    return linear


def loss(model: Any, batch: Tensor) -> Tensor:
    if batch.is_cuda:
        torch.cuda._sleep(int(model.compute))
    else:
        time.sleep(model.compute)
    return model(batch).square().mean()

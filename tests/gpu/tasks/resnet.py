"""A ResNet on made-up pictures, uint8 until they are on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.gpu.models import resnet


@dataclass
class Settings:
    size: int = 224
    classes: int = 1000
    count: int = 1024
    width: int = 64
    depth: int = 50
    """50, or 14 for a small one."""


def datasets(config: Any) -> tuple[TensorDataset, None]:
    task = config.task
    pictures = torch.randint(256, (task.count, 3, task.size, task.size), dtype=torch.uint8)
    return TensorDataset(pictures, torch.randint(task.classes, (task.count,))), None


def model(config: Any) -> nn.Module:
    task = config.task
    return resnet((3, 4, 6, 3) if task.depth == 50 else (1, 1, 1, 1), task.width, task.classes)


def loss(model: nn.Module, batch: Any) -> Tensor:
    pictures, labels = batch
    return nn.functional.cross_entropy(model(pictures.to(torch.float32).div(255).sub(0.5).div(0.25)), labels)

"""A ResNet on made-up pictures, uint8 until they are on the device. Written out: torchvision need not be here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


@dataclass
class Settings:
    size: int = 224
    classes: int = 1000
    count: int = 1024
    width: int = 64
    depth: int = 50
    """50, or 14 for a small one."""


class Bottleneck(nn.Module):
    """He et al., "Deep Residual Learning" (2015), with the stride in the 3x3 convolution, as is usual now."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def datasets(config: Any) -> tuple[TensorDataset, None]:
    task = config.task
    pictures = torch.randint(256, (task.count, 3, task.size, task.size), dtype=torch.uint8)
    return TensorDataset(pictures, torch.randint(task.classes, (task.count,))), None


def model(config: Any) -> nn.Module:
    """Pictures (N, 3, H, W) to logits (N, classes)."""
    width = inputs = config.task.width
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    for place, count in enumerate((3, 4, 6, 3) if config.task.depth == 50 else (1, 1, 1, 1)):
        for block in range(count):
            layers.append(Bottleneck(inputs, width << place, 2 if place and not block else 1))
            inputs = 4 * (width << place)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, config.task.classes))


def loss(model: nn.Module, batch: Any) -> Tensor:
    pictures, labels = batch
    return nn.functional.cross_entropy(model(pictures.to(torch.float32).div(255).sub(0.5).div(0.25)), labels)

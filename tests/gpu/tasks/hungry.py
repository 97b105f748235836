"""A step that fills the device, or reads beyond the end of a table, when that is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


@dataclass
class Settings:
    sample: int = 0
    """Bytes of the device that the forward of a sample takes."""
    most: int = 1_000_000
    """Samples of a micro batch that a CPU takes at most."""
    full: int = 0
    """The forward that fills the device; 0: none."""
    wrong: int = 0
    """The forward that reads beyond the end of a table; 0: none."""


class Hungry(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings, self.seen = settings, 0
        self.weight, self.table = nn.Parameter(torch.ones(1)), nn.Embedding(16, 4)

    def forward(self, numbers: Tensor) -> Tensor:
        self.seen += 1
        places = numbers % 16
        if self.seen == self.settings.wrong:
            places = places + 16
        if self.seen == self.settings.full or (len(numbers) > self.settings.most and not numbers.is_cuda):
            fill(numbers.device)
        values = numbers.new_ones((len(numbers), self.settings.sample // 8 + 1), dtype=torch.float32)
        return (values * self.weight).mean() + self.table(places).square().mean()  # kept: the values; and as much again


def fill(device: torch.device) -> None:
    """Take memory until there is no more. A CPU is asked for more than any machine has: it would be its end."""
    part = torch.cuda.mem_get_info(device)[1] // 8 if device.type == "cuda" else 1 << 50
    held = [torch.empty(part, dtype=torch.uint8, device=device) for _ in range(9)]
    raise AssertionError(f"{len(held)} times {part} bytes are no more than it has")


def datasets(config: Any) -> tuple[TensorDataset, None]:
    return TensorDataset(torch.arange(256)), None


def model(config: Any) -> nn.Module:
    return Hungry(config.task)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0])

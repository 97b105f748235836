"""A large frozen base with a small adapter, and a teacher: frozen too, but moved by after_step from a step on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tests.tasks.learner import Points

DEFAULTS = {"epochs": 2.5, "batch_size": 16, "micro_batch_size": 4, "cpu_threads": 1, "log.tensorboard": False}


@dataclass
class Settings:
    width: int = 256
    moves_from: int = 1000
    """The first step after which the teacher moves."""


class Adapted(nn.Module):
    def __init__(self, width: int, moves_from: int) -> None:
        super().__init__()
        self.moves_from = moves_from
        self.base = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Linear(width, width))
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, 4, bias=False)
        self.teacher = nn.Linear(2, 4, bias=False)
        self.base.requires_grad_(False)
        self.teacher.requires_grad_(False)

    def forward(self, points: Tensor) -> Tensor:
        inner = self.down(self.base(points))
        return self.up(inner) + self.teacher(inner)


def datasets(config: Any) -> tuple[Points, Points]:
    return Points(55, 0, 0.2), Points(23, 100, 0)


def model(config: Any) -> Adapted:
    return Adapted(config.task.width, config.task.moves_from)


def after_step(model: Adapted, step: int, stateful: Any) -> None:
    if step >= model.moves_from:
        model.teacher.weight.lerp_(model.up.weight, 0.1)


def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["point"]), batch["label"])

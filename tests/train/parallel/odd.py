"""A task for tests: models that people write, and that a way to spread a model could get wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


@dataclass
class Settings:
    optimizer: str = ""
    """`NAdam` and such, over two groups, one of them empty."""
    kind: str = "plain"
    """`optional`: most steps do not use its last layer; `assigned`: its buffers are other tensors after each forward;
    `growing`: one has another shape after each; `complex`: it has a weight of complex numbers;
    `penalised`: its loss asks it for what only it knows, and for parameters by name; `methods`: its loss never calls
    it, only methods of its own, and assigns one of its buffers; `teacher`: it follows its own weights with parameters
    that no optimizer updates; `late`: one of its buffers is made in its first forward."""


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.enter, self.leave = nn.Linear(3, 8), nn.Linear(8, 1)
        self.extra = nn.Linear(8, 1) if kind == "optional" else nn.Identity()
        self.turn = nn.Parameter(torch.tensor([0.6 + 0.8j])) if kind == "complex" else None
        if kind == "teacher":
            self.teacher = nn.Linear(3, 8).requires_grad_(False)
        if kind == "late":
            self.register_buffer("center", None)
        if kind == "methods":
            self.register_buffer("is_used", torch.zeros(1))
        if kind in ("assigned", "growing"):
            self.register_buffer("mean", torch.zeros(8))
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
            self.register_buffer("cache", torch.zeros(1), persistent=False)

    def encode(self, points: Tensor) -> Tensor:
        return torch.tanh(self.enter(points))

    def forward(self, ids: Tensor, points: Tensor) -> Tensor:
        hidden = self.encode(points)
        if self.kind == "teacher" and self.training:
            self.teacher.weight.lerp_(self.enter.weight.detach(), 0.5)
            hidden = hidden + torch.tanh(self.teacher(points))
        if self.kind == "late" and self.center is None:
            self.center = hidden.detach().mean(0)
        if self.kind in ("assigned", "growing"):
            if self.training:
                self.mean = 0.9 * self.mean[:8] + 0.1 * hidden.detach().mean(0)
                self.seen = self.seen + len(ids)
                self.cache = torch.zeros(len(ids))
            if self.kind == "growing":
                self.mean = torch.cat([self.mean, self.mean])
            hidden = hidden - self.mean[:8]
        if self.turn is not None:
            hidden = (hidden * self.turn).imag.to(hidden.dtype)
        found = self.leave(hidden)
        if self.kind == "optional" and bool((ids % 5 == 1).all()):
            found = found + self.extra(hidden)
        return found


def datasets(config: Any) -> tuple[TensorDataset, None]:
    points = torch.randn(22, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(torch.arange(22), points, points.sin().sum(1, keepdim=True)), None


def model(config: Any) -> nn.Module:
    return Net(config.task.kind)


def optimizer(model: nn.Module, config: Any) -> torch.optim.Optimizer:
    kind = getattr(torch.optim, config.task.optimizer or "SGD")
    return kind([{"params": [], "weight_decay": 0.1}, {"params": model.parameters()}], lr=0.01)


def loss(model: nn.Module, batch: Any) -> Tensor:
    ids, points, wanted = batch
    if model.kind == "methods":
        model.is_used = torch.ones_like(model.is_used)
        return (model.leave(model.encode(points)) - wanted).square().mean()
    found = (model(ids, points) - wanted).square().mean()
    if model.kind == "penalised":
        found = found + 0.1 * sum(p.square().sum() for name, p in model.named_parameters() if name.startswith("leave"))
    return found

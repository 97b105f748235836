"""A task for tests: models that people write, and that a way to spread a model could get wrong.

Beside the copy in a run folder a file `script` may say which signal comes to a rank in a step (counted from 1 in each
attempt), before it computes: lines `STEP RANK SIGNAL`.
"""

from __future__ import annotations

import math
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
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
    that no optimizer updates, and `moved` does so past torch's count of changes, from a copy of them on; `averaged`: a
    hook of its optimizer's step keeps averages of its weights, in a parameter and a buffer; `normed`: its forward
    shortens long rows of its weights;
    `masked`: it has a frozen parameter of infinities, and a mask made by expand(); `unfrozen`: it trains a frozen
    parameter from its third forward on; `late`: one of its buffers is made in its first forward."""


TEACHERS = ("teacher", "moved")


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.enter, self.leave = nn.Linear(3, 8), nn.Linear(8, 1)
        self.extra = nn.Linear(8, 1) if kind == "optional" else nn.Identity()
        self.turn = nn.Parameter(torch.tensor([0.6 + 0.8j])) if kind == "complex" else None
        if kind in TEACHERS:
            self.teacher = nn.Linear(3, 8).requires_grad_(False)
            if kind == "moved":
                self.teacher.load_state_dict(self.enter.state_dict())
        if kind == "averaged":
            self.mean = nn.Linear(3, 8).requires_grad_(False)
            self.mean.load_state_dict(self.enter.state_dict())
            self.register_buffer("other", torch.zeros(8, 3))
        if kind in ("masked", "unfrozen"):
            self.mask = nn.Parameter(torch.tensor([0.0, -math.inf]), requires_grad=False)
            self.register_buffer("wide", torch.ones(1, 8).expand(4, 8), persistent=False)
            self.calls = 0
        if kind == "normed":
            self.table = nn.Embedding(22, 8, max_norm=1.0)
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

    def follow(self) -> None:
        teacher, own = self.teacher.weight, self.enter.weight.detach()
        if self.kind == "moved":
            teacher.data = 0.5 * teacher.data + 0.5 * own
        else:
            teacher.lerp_(own, 0.5)

    def forward(self, ids: Tensor, points: Tensor) -> Tensor:
        hidden = self.encode(points)
        if self.kind in TEACHERS:
            if self.training:
                self.follow()
            hidden = hidden + torch.tanh(self.teacher(points))
        if self.kind == "unfrozen":
            self.calls += 1
            self.leave.bias.requires_grad_(True)
            self.mask.requires_grad_(self.calls > 2)
        if self.kind == "normed":
            hidden = hidden + self.table(ids)
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
    made = kind([{"params": [], "weight_decay": 0.1}, {"params": model.parameters()}], lr=0.01)
    if config.task.kind == "averaged":

        def average(*_: Any) -> None:
            own = model.enter.weight.detach()
            model.mean.weight.mul_(0.5).add_(own, alpha=0.5)
            own = own.full_tensor() if isinstance(own, DTensor) else own
            model.other.data = 0.5 * model.other.data + 0.5 * own

        made.register_step_post_hook(average)
    return made


_script = Path(__spec__.origin).with_name("script")  # in the run folder, where the copy of this file lies
_plan = [line.split() for line in _script.read_text().splitlines()] if _script.exists() else []
_made = {"steps": 0}


def _count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if optimizer.param_groups[0]["lr"] > 0:  # torch makes a fresh optimizer's state by a step with rate 0
        _made["steps"] += 1


if _plan:
    register_optimizer_step_post_hook(_count)


def _act() -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    for line in [line for line in _plan if line[:2] == [str(_made["steps"] + 1), str(rank)]]:
        _plan.remove(line)
        os.kill(os.getpid(), signal.Signals[line[2]])


def loss(model: nn.Module, batch: Any) -> Tensor:
    _act()
    ids, points, wanted = batch
    if model.kind == "methods":
        model.is_used = torch.ones_like(model.is_used)
        return (model.leave(model.encode(points)) - wanted).square().mean()
    found = (model(ids, points) - wanted).square().mean()
    if model.kind == "penalised":
        found = found + 0.1 * sum(p.square().sum() for name, p in model.named_parameters() if name.startswith("leave"))
    return found

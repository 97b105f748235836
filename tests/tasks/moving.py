"""A task with state of its own, a momentum encoder and weights that are clamped after each step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.tasks import learner
from tests.tasks.learner import Points


@dataclass
class Settings(learner.Settings):
    by_rank: bool = False
    """Whether the state differs between ranks."""
    sees: bool = False
    """Whether a forward in an evaluation changes a buffer."""


class History:
    """Grows in each step, by lists and tensors."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.mean = torch.zeros(4)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.mean = state["steps"], state["mean"]


class Pair(nn.Module):
    def __init__(self, settings: Any) -> None:
        super().__init__()
        self.student, self.teacher = learner.Net(settings), learner.Net(settings)
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)
        self.sees, self.random = settings.sees, torch.Generator()
        self.register_buffer("code", torch.zeros(6))
        self.register_buffer("mask", torch.tensor([-torch.inf, 0.0]))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        if self.sees and not self.training:
            self.seen.add_(0.1)
        points = points + 0.1 * self.code + self.seen + 0.01 * torch.rand((), generator=self.random)
        return self.student(points), self.teacher(points)


def datasets(config: Any) -> tuple[Points, Points | None]:
    _settings["now"] = config.task
    return learner.datasets(config)


def model(config: Any) -> nn.Module:
    return Pair(config.task)


def loss(model: Any, batch: Any) -> Tensor:
    aims = []

    def student(points: Tensor) -> Tensor:
        made, aim = model(points)
        aims.append((made - aim.detach()).square().mean())
        return made

    student.training = model.training  # type: ignore[attr-defined]
    return learner.loss(student, batch) + aims[0]  # type: ignore[arg-type]


def metrics(model: Any, batch: Any) -> dict[str, Tensor]:
    return learner.metrics(lambda points: model(points)[0], batch)  # type: ignore[arg-type]


def stateful(model: nn.Module, config: Any) -> dict[str, Any]:
    return {"history": History(), "head": nn.Linear(2, 2)}


def after_step(model: Any, step: int, stateful: dict[str, Any]) -> None:
    for slow, fast in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
        slow.lerp_(fast, 0.1)
    model.student.leave.weight.clamp_(-0.3, 0.3)
    stateful["history"].steps.append(step)
    bias = model.student.leave.bias
    whole = bias.full_tensor() if isinstance(bias, DTensor) else bias
    stateful["history"].mean = 0.9 * stateful["history"].mean.to(whole) + 0.1 * whole + 1e-3 * torch.rand(4)
    if _settings["now"].by_rank and dist.is_initialized():
        stateful["history"].mean += dist.get_rank()
    stateful["head"].weight.add_(stateful["history"].mean.mean())
    model.code = 0.9 * model.code + 0.1 * torch.rand(6, generator=model.random).to(model.code)
    bias.add_(0.01 * stateful["head"].weight.mean().item())


_settings: dict[str, Any] = {}
_script = Path(__spec__.origin).with_name("script")  # in the run folder, where the copy of this file lies
if _script.exists():
    learner._plan += [line.split() for line in _script.read_text().splitlines()]
    register_optimizer_step_post_hook(learner._count)

"""A task with two updates a step: a generator and a discriminator of points, with batch norm in both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import TensorDataset

from tests.tasks import learner


@dataclass
class Settings:
    every: int = 2
    """Of the generator."""
    parts: bool = False
    """The losses have parts."""
    norm: bool = False
    wrong: str = ""
    """What updates() does wrong."""


class Gan(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.g = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.Tanh(), nn.Linear(8, 2))
        self.d = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.Tanh(), nn.Linear(8, 1))


def datasets(config: Any) -> tuple[TensorDataset, TensorDataset]:
    points = torch.randn(55, 2, generator=torch.Generator().manual_seed(1))
    return TensorDataset(points + 2), TensorDataset(points[:23] + 2)


def model(config: Any) -> nn.Module:
    return Gan(config.task.norm)


def d_loss(model: Any, batch: Any) -> Any:
    if model.training:
        learner._act(_steps() + 1)
    (points,) = batch
    made = model.g(torch.randn(len(points), 3).to(points))
    ones = torch.ones(len(points), 1).to(points)
    cross = nn.functional.binary_cross_entropy_with_logits
    real, fake = cross(model.d(points), ones), cross(model.d(made), 0 * ones)
    return (real + fake, {"real": real, "fake": fake}) if _parts["are"] else real + fake


def g_loss(model: Any, batch: Any) -> Any:
    (points,) = batch
    made = model.g(torch.randn(len(points), 3).to(points))
    loss = nn.functional.softplus(-model.d(made)).mean()
    return (loss, {"half": loss / 2}) if _parts["are"] else loss


def metrics(model: Any, batch: Any) -> dict[str, Tensor]:
    (points,) = batch
    return {"score": model.d(points).mean()}


def updates(model: Any, config: Any) -> dict[str, dict[str, Any]]:
    _parts["are"] = config.task.parts
    d = torch.optim.Adam(model.d.parameters(), lr=0.02, betas=(0.5, 0.9))
    g = torch.optim.SGD(model.g.parameters(), lr=0.05, momentum=0.9)
    match config.task.wrong:
        case "twice":
            g.add_param_group({"params": [model.d[0].bias]})
        case "left out":
            d = torch.optim.Adam(model.d[0].parameters())
        case "key":
            return {"d": {"loss": d_loss, "optimizer": d, "evry": 2}}
        case "never":
            return {
                "d": {"loss": d_loss, "optimizer": d, "every": 2},
                "g": {"loss": g_loss, "optimizer": g, "every": 3},
            }
        case "no optimizer":
            return {"d": {"loss": d_loss}}
    return {
        "d": {"loss": d_loss, "optimizer": d},
        "g": {"loss": g_loss, "optimizer": g, "every": config.task.every},
    }


_parts = {"are": False}


def _steps() -> int:
    return int(learner._state["step"])


def _count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if isinstance(optimizer, torch.optim.Adam):
        learner._count(optimizer)


_script = Path(__spec__.origin).with_name("script")  # in the run folder, where the copy of this file lies
if _script.exists():
    learner._plan += [line.split() for line in _script.read_text().splitlines()]
    register_optimizer_step_post_hook(_count)

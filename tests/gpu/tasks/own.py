"""Two updates a step, a teacher and a queue of a task's own, and a buffer that is reassigned after each step."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


@dataclass
class Settings:
    count: int = 256


class Queue:
    """The last codes, on the device."""

    def __init__(self, codes: Tensor) -> None:
        self.codes = codes

    def state_dict(self) -> dict[str, Any]:
        return {"codes": self.codes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.codes = state["codes"]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(32, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(), nn.Linear(128, 8))
        self.decode = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 32))
        self.register_buffer("center", torch.zeros(8))


def datasets(config: Any) -> tuple[TensorDataset, TensorDataset]:
    points = torch.randn(config.task.count, 32)
    return TensorDataset(points), TensorDataset(points[:64])


def model(config: Any) -> nn.Module:
    return Pair()


def _decoded(model: Any, batch: Any) -> Tensor:
    return (model.decode(model.encode(batch[0]) - model.center) - batch[0]).square().mean()


def _spread(model: Any, batch: Any) -> Tensor:
    return _decoded(model, batch) - 0.1 * model.encode(batch[0]).std()


def updates(model: Any, config: Any) -> dict[str, dict[str, Any]]:
    return {
        "decode": {"loss": _decoded, "optimizer": torch.optim.Adam(model.decode.parameters(), lr=1e-3)},
        "encode": {"loss": _spread, "optimizer": torch.optim.SGD(model.encode.parameters(), lr=1e-2), "every": 2},
    }


def stateful(model: Any, config: Any) -> dict[str, Any]:
    return {"teacher": copy.deepcopy(model.encode), "queue": Queue(model.center.repeat(4, 1))}


def after_step(model: Any, step: int, stateful: dict[str, Any]) -> None:
    for slow, fast in zip(stateful["teacher"].parameters(), model.encode.parameters(), strict=True):
        slow.lerp_(fast, 0.1)
    queue = stateful["queue"]
    queue.codes = torch.cat([queue.codes[1:], model.encode[-1].bias[None] + torch.rand_like(queue.codes[:1])])
    model.center = 0.9 * model.center + 0.1 * queue.codes.mean(0)


def metrics(model: Any, batch: Any) -> dict[str, Tensor]:
    return {"error": _decoded(model, batch)}

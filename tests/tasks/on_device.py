"""A small task with all that a step on a GPU may do, and with waits for the GPU on request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset


@dataclass
class Settings:
    counted: bool = False
    """The loss is (total, count)."""
    bad: str = ""
    """Samples of the training set that cannot be read."""
    fault: str = ""
    """What the loss does that nobody should."""


class Pictures(Dataset[Any]):
    """Some of them damaged."""

    def __init__(self, count: int, bad: str) -> None:
        self.pictures = torch.zeros(count, 3, 6, 6, dtype=torch.uint8)
        self.bad = {int(index) for index in bad.split()}

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index in self.bad:
            raise ValueError(f"no {index}")
        return self.pictures[index], torch.tensor(index % 4)


class Net(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.leave = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.1)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, pictures: Tensor) -> Tensor:
        hidden = self.norm(self.enter(pictures)).relu().mean((2, 3))
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)  # another tensor, each time
        return self.leave(self.dropout(hidden - self.mean) * self.frozen)


def datasets(config: Any) -> tuple[Any, Any]:
    if config.task.bad:
        return Pictures(20, config.task.bad), None
    sizes = 20, 12
    train, held_out = (TensorDataset(torch.zeros(n, 3, 6, 6, dtype=torch.uint8), torch.arange(n) % 4) for n in sizes)
    return train, held_out


def on_device(batch: Any) -> Any:
    pictures, labels = batch
    return pictures.float().div_(255), labels


def model(config: Any) -> nn.Module:
    _state["settings"] = config.task
    return Net()


def loss(model: nn.Module, batch: Any) -> Any:
    settings, (pictures, labels) = _state["settings"], batch
    scores = model(pictures)
    if model.training and settings.fault:
        scores = scores + _FAULTS[settings.fault](scores)
    if settings.counted:
        each = nn.functional.cross_entropy(scores, labels, reduction="none")
        return (each * (labels > 0)).sum(), (labels > 0).sum()
    return nn.functional.cross_entropy(scores, labels)


def metrics(model: nn.Module, batch: Any) -> dict[str, Any]:
    pictures, labels = batch
    right = model(pictures).argmax(1) == labels
    return {"accuracy": right.float().mean(), "right": (right.sum(), len(labels))}


_FAULTS = {
    "item": lambda scores: scores.sum().item(),
    "bool": lambda scores: 1 if scores.sum() > 0 else 0,
    "tensor": lambda scores: torch.tensor(1.0, device=scores.device),
    "copy": lambda scores: torch.ones(4).to(scores.device, non_blocking=True),
    "pinned": lambda scores: torch.ones(4, pin_memory=True).to(scores.device),
    "back": lambda scores: scores.detach().to("cpu").sum().to(scores.device, non_blocking=True),
    "index": lambda scores: scores[torch.tensor([0])],
}
_state: dict[str, Any] = {}

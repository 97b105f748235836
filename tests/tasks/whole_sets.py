"""A task for tests of evaluation: two named sets, predictions, pictures, and an inference model inside the model."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


@dataclass
class Settings:
    unreadable: int = -1
    """A sample of the set `test` that cannot be read."""
    seconds: float = 0.0
    """That compute_metrics takes."""
    test: int = 30
    """Samples of that set."""


class Points(Dataset[dict[str, Any]]):
    def __init__(self, count: int, seed: int, unreadable: int = -1) -> None:
        self.points = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
        self.labels = (self.points[:, 0] * self.points[:, 1] > 0).long()
        self.unreadable = unreadable

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.unreadable:
            raise ValueError(f"no {index}")
        return {"id": index, "point": self.points[index], "label": self.labels[index]}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
        self.other = nn.Linear(6, 2)

    def forward(self, points: Tensor) -> Tensor:
        return self.body(points) + self.other(points)


def datasets(config: Any) -> tuple[Any, dict[str, Any]]:
    _state["settings"] = config.task
    return Points(55, 1), {"val": Points(23, 2), "test": Points(config.task.test, 3, config.task.unreadable)}


def model(config: Any) -> nn.Module:
    return Net()


def inference_model(model: Any) -> nn.Module:
    return model.body


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch["point"]), batch["label"])


def metrics(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"accuracy": (model(batch["point"]).argmax(1) == batch["label"]).double().mean()}


def predict(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {"score": model(batch["point"]).softmax(1)[:, 1], "label": batch["label"], "id": batch["id"].tolist()}


def compute_metrics(predictions: Any) -> dict[str, Any]:
    time.sleep(_state["settings"].seconds)
    score, label, ids = (predictions[name] for name in ("score", "label", "id"))
    assert ids == sorted(set(ids))
    hit, right = score > 0.5, label[score.argsort(descending=True)].double()
    precision = right.cumsum(0) / torch.arange(1, len(right) + 1)
    return {
        "f1": 2 * (hit & (label == 1)).sum().double() / (hit.sum() + label.sum()),
        "ap": (precision * right).sum() / right.sum(), "drawn": torch.rand(()), "seen": len(ids), "first": ids[0],
    }  # fmt: skip


def images(model: nn.Module, batch: Any) -> dict[str, Any]:
    from matplotlib.figure import Figure

    figure = Figure((2, 2))
    figure.subplots().plot(model(batch["point"][:1])[0])
    return {"curve": figure, "noise": torch.rand(3, 1, 8, 8)}


_state: dict[str, Any] = {}

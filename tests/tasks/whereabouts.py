"""A task each of whose functions asks where the run is. What they were told is logged, as parts of the loss and as
metrics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import train
import trainstation


class Asking(Dataset[Any]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([*train.progress(), 0, index], dtype=torch.float64)


def datasets(config: Any) -> tuple[Asking, Asking]:
    return Asking(55), Asking(23)


def collate(items: list[Tensor]) -> Tensor:
    batch = torch.stack(items)
    batch[:, 3] = train.progress().step
    return batch


def on_device(batch: Tensor) -> tuple[Tensor, int]:
    return batch, train.progress().step


def model(config: Any) -> nn.Module:
    return nn.Linear(1, 1).double()


def told(batch: Any) -> dict[str, Any]:
    told, on_device = batch
    fetched = {f"fetched_{name}": told[:, at].mean() for at, name in enumerate(("step", "epoch", "total", "collate"))}
    here = dict(zip(("step", "epoch", "total"), map(float, trainstation.progress()), strict=True))  # type: ignore[attr-defined]
    return fetched | here | {"on_device": float(on_device)}


def loss(model: nn.Module, batch: Any) -> Any:
    return model(batch[0][:, 4:]).mean() * 0.01, told(batch)


def metrics(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {f"metric_{name}": value for name, value in told(batch).items()}


def predict(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"step": batch[0][:, 0] * 0 + train.progress().step}


def compute_metrics(predictions: Any) -> dict[str, float]:
    return {"predicted_step": predictions["step"].mean(), "computed_step": train.progress().step}

"""A task for tests that reads tar or parquet shards from data.root."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn

import train


def decode(sample: dict[str, Any]) -> tuple[Tensor, int]:
    """Of a row, or of the files of a tar."""
    if "json" in sample:
        sample = json.loads(sample["json"])
    return torch.tensor(sample["point"]) + 0.1 * torch.randn(6), sample["label"]


def datasets(config: Any) -> Any:
    root = config.data.root
    return train.shards(f"{root}/train-*", decode), train.shards(f"{root}/val-*", decode)


def model(config: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 4))


def loss(model: nn.Module, batch: Any) -> Tensor:
    points, labels = batch
    return nn.functional.cross_entropy(model(points), labels)

"""A GPT on made-up tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.gpu.models import GPT, GPT_VOCABULARY


@dataclass
class Settings:
    vocabulary: int = GPT_VOCABULARY
    context: int = 1024
    layers: int = 12
    width: int = 768
    heads: int = 12
    dropout: float = 0.0
    count: int = 512


def datasets(config: Any) -> tuple[TensorDataset, None]:
    task = config.task
    text = torch.randint(task.vocabulary, (task.count, task.context + 1))
    return TensorDataset(text[:, :-1], text[:, 1:]), None


def model(config: Any) -> nn.Module:
    task = config.task
    return GPT(task.vocabulary, task.context, task.layers, task.width, task.heads, task.dropout)


def loss(model: nn.Module, batch: Any) -> Tensor:
    text, following = batch
    return nn.functional.cross_entropy(model(text).flatten(0, 1), following.flatten())

"""The GPT of the built-in task `text` on made-up tokens: as it is, of 124 million parameters like GPT-2 small."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from train.tasks import text


@dataclass
class Settings:
    vocabulary: int = 50304
    """GPT-2's 50,257, rounded up to a multiple of 64, which matrix products like better."""
    context: int = 1024
    layers: int = 12
    width: int = 768
    heads: int = 12
    dropout: float = 0.0
    count: int = 512


def datasets(config: Any) -> tuple[TensorDataset, None]:
    task = config.task
    tokens = torch.randint(task.vocabulary, (task.count, task.context + 1))
    return TensorDataset(tokens[:, :-1], tokens[:, 1:]), None


def model(config: Any) -> nn.Module:
    task = config.task
    gpt = text.GPT(task.context, task.width, task.layers, task.heads, task.dropout)
    gpt.bytes = nn.Embedding(task.vocabulary, task.width)
    nn.init.normal_(gpt.bytes.weight, std=0.02)
    gpt.head = nn.Linear(task.width, task.vocabulary, bias=False)
    gpt.head.weight = gpt.bytes.weight
    return gpt


loss = text.loss

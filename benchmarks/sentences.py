"""A task for benchmarks: a small transformer over sequences as long as sentences are, padded by `collate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

DEFAULTS = {"batch_size": 32, "log.tensorboard": False, "checkpoint.every_minutes": 0}


@dataclass
class Settings:
    samples: int = 2000
    width: int = 64


class Sentences(Dataset[Tensor]):
    """Tokens from 1 to 999. The lengths are log-normal, as those of sentences: half of them below 22, from 3 to 200."""

    def __init__(self, samples: int) -> None:
        draw = torch.Generator().manual_seed(0)
        lengths = torch.empty(samples).log_normal_(3.1, 0.7, generator=draw).long().clamp(3, 200).tolist()
        self.sentences = [torch.randint(1, 1000, (length,), generator=draw) for length in lengths]

    def __len__(self) -> int:
        return len(self.sentences)

    def __getitem__(self, index: int) -> Tensor:
        return self.sentences[index]


class Tagger(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, width, padding_idx=0)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        made: Tensor = self.head(self.layers(self.embed(tokens), src_key_padding_mask=tokens == 0))
        return made


def datasets(config: Any) -> tuple[Sentences, None]:
    return Sentences(config.task.samples), None


def collate(items: list[Tensor]) -> Tensor:
    return pad_sequence(items, batch_first=True)


def model(config: Any) -> nn.Module:
    return Tagger(config.task.width)


def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    mask = batch > 0
    return nn.functional.cross_entropy(model(batch)[mask], batch[mask] % 2, reduction="sum"), mask.sum()

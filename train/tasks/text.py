"""Byte-level language modelling over a folder of text files, with a small GPT.

    train launch text --data.root /datasets/books

Files in `train/` and `val/` are used as such; without these folders the last tenth of each file is held out.
Links are followed; hidden files and folders are left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ..config import Count, Share
from ..data.text import Corpus, text_files
from ..errors import Refused
from . import data_root

DEFAULTS = {
    "epochs": 1,
    "batch_size": 64,
    "optim.name": "adamw",
    "optim.lr": 1e-3,
    "optim.weight_decay": 0.1,
    "schedule.warmup_epochs": 0.05,
    "clip_grad_norm": 1.0,
}


@dataclass
class Settings:
    context: Count = 128
    """Bytes that the model sees at once."""
    width: Count = 128
    """Size of the residual stream."""
    layers: Count = 4
    """Transformer blocks."""
    heads: Count = 4
    """Attention heads; must divide width."""
    dropout: Share = 0.1
    """Dropout after attention, feed-forward and embedding."""


class Blocks(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive blocks of a text: item i is (bytes i*T … i*T+T-1, the same moved on by one), int64 of shape (T,)."""

    def __init__(self, text: Corpus | np.ndarray, context: int) -> None:
        """
        Args:
            text: bytes; those of a Corpus are not in memory.
        """
        self.text, self.context = text, context

    def __len__(self) -> int:
        return max(len(self.text) - 1, 0) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        block = torch.from_numpy(self.text[start : start + self.context + 1].astype(np.int64))
        return block[:-1], block[1:]


def _is_split(root: Path) -> bool:
    return (root / "train").is_dir() and (root / "val").is_dir()


def datasets(config: Any) -> tuple[Blocks, Blocks]:
    task = config.task
    if task.width % task.heads:
        raise Refused(f"--task.heads {task.heads}: must divide --task.width {task.width}")
    root = data_root(config.data.root)
    if _is_split(root):
        parts = [[(path, 0, size) for path, size in text_files(root / part)] for part in ("train", "val")]
    else:
        cuts = [(path, size - size // 10, size) for path, size in text_files(root)]
        parts = [[(path, 0, cut) for path, cut, _ in cuts], cuts]
    train, held_out = (Blocks(Corpus(part), task.context) for part in parts)
    if not len(train) or not len(held_out):
        raise Refused(f"{root} holds too little text for --task.context {task.context}; add text or lower it")
    return train, held_out


def fingerprint(config: Any) -> dict[str, int]:
    """Return the files that samples are cut from, with their sizes."""
    root = data_root(config.data.root)
    folders = [root / "train", root / "val"] if _is_split(root) else [root]
    return {str(path.relative_to(root)): size for folder in folders for path, size in text_files(folder)}


class Block(nn.Module):
    """A pre-norm transformer block (Radford et al., GPT-2, 2019)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.before_feed_forward = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.query_key_value(self.before_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        mixed = self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        x = x + nn.functional.dropout(mixed, self.dropout, self.training)
        return x + self.feed_forward(self.before_feed_forward(x))


class GPT(nn.Module):
    """Bytes (batch, T) to logits (batch, T, 256)."""

    def __init__(self, context: int, width: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # GPT-2: projections back into the residual stream start smaller, the deeper the network
                deep = name.endswith(("project.weight", "feed_forward.2.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if deep else 0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.dropout(self.bytes(text) + self.positions(torch.arange(text.shape[1], device=text.device)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def model(config: Any) -> nn.Module:
    task = config.task
    return GPT(task.context, task.width, task.layers, task.heads, task.dropout)


def loss(model: nn.Module, batch: Any) -> Tensor:
    text, following = batch
    return nn.functional.cross_entropy(model(text).flatten(0, 1), following.flatten())


def metrics(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    text, following = batch
    logits = model(text)
    nats = nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())
    accuracy = (logits.argmax(-1) == following).double().mean()
    return {"loss": nats, "bits_per_byte": nats / math.log(2), "accuracy": accuracy}

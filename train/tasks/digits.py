"""Handwritten digits: 1,797 real scans of 8x8 pixels that ship with scikit-learn, and a small convolutional network.

train launch digits --nproc 2 --follow
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils.data import Dataset

from ..config import Count, Share
from ..errors import Refused

DEFAULTS = {
    "epochs": 12,
    "batch_size": 64,
    "optim.name": "sgd",
    "optim.lr": 0.05,
    "optim.weight_decay": 5e-4,
    "schedule.warmup_epochs": 1,
}


@dataclass
class Settings:
    width: Count = 32
    """Channels of the first convolution."""
    dropout: Share = 0.2
    """Dropout before the last layer."""
    shift: Annotated[int, Field(ge=0, le=8)] = 1
    """Augmentation: maximum number of pixels by which each scan is moved in both directions."""


class Scans(Dataset[tuple[Tensor, int]]):
    """Scans as (1, 8, 8) float tensors in [0, 1] with their digit."""

    def __init__(self, images: Tensor, digits: Tensor, shift: int) -> None:
        self.images, self.digits, self.shift = images, digits, shift

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        images = self.images[indices]
        if self.shift:
            size = 2 * self.shift + 1
            moves = torch.randint(size, (len(indices), 2)).tolist()
            padded = nn.functional.pad(images, [self.shift] * 4)
            images = torch.stack([image[:, y : y + 8, x : x + 8] for image, (y, x) in zip(padded, moves, strict=True)])
        return list(zip(images, self.digits[indices].tolist(), strict=True))


def _file() -> Path:
    """Return the file of the scans that scikit-learn ships. It is found without importing scikit-learn, which takes
    longer than training on them."""
    package = importlib.util.find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise Refused("the digits ship with scikit-learn, which is not installed; pip install scikit-learn")
    return Path(package.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"


def datasets(config: Any) -> tuple[Scans, Scans]:
    table = np.loadtxt(_file(), delimiter=",", dtype=np.float32)  # a row a scan: 64 grey values 0 to 16, the digit
    images = torch.from_numpy(table[:, :64] / 16).reshape(-1, 1, 8, 8)
    digits = torch.from_numpy(table[:, 64].astype(np.int64))
    shuffled = torch.from_numpy(np.random.default_rng(0).permutation(len(digits)))  # one split for every seed
    test, train = shuffled[:360], shuffled[360:]
    return Scans(images[train], digits[train], config.task.shift), Scans(images[test], digits[test], 0)


def model(config: Any) -> nn.Module:
    width = config.task.width
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(config.task.dropout),
        nn.Linear(2 * width * 16, 10),
    )


def loss(model: nn.Module, batch: Any) -> Tensor:
    images, digits = batch
    return nn.functional.cross_entropy(model(images), digits)


def metrics(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    images, digits = batch
    logits = model(images)
    return {
        "loss": nn.functional.cross_entropy(logits, digits),
        "accuracy": (logits.argmax(1) == digits).double().mean(),
    }

"""A task for tests, with everything in it that could depend on ranks, workers or restarts.

Beside the copy in a run folder a file `script` may say what happens to a rank while it computes a step (counted from
1 in each attempt): lines `STEP RANK ACTION`, where ACTION is the name of a signal, `limit`, after which this rank can
write no file beyond 16 kB, `vector`, for a loss that is no scalar, `copy`, after which the state is copied into memory
after every step however long that takes (rank 0 decides), or `sh` with a command line for a shell.
"""

from __future__ import annotations

import math
import os
import random
import resource
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import Dataset

from train.checkpoint import snapshot


@dataclass
class Settings:
    samples: int = 55
    evaluation: int = 23
    width: int = 24
    dropout: float = 0.3
    noise: float = 0.2
    """Augmentation."""
    batchnorm: bool = False
    tied: bool = False
    """The last layer shares its weights with the one before."""
    counted: bool = False
    """The loss is (total, count): every third sample does not count."""
    parts: str = ""
    """The loss has parts: `all`; `late`: one more once there is a file of this name in the run folder."""
    count_ids: bool = False
    """One metric a sample of the evaluation: its share of all samples."""
    poison: int = -1
    """The sample of the training set whose loss is not finite."""
    poison_value: float = 0.0
    """What its loss is divided by; if negative, the loss is NaN."""


class Points(Dataset[dict[str, Any]]):
    """Points with a label, augmented by noise from each generator there is."""

    def __init__(self, count: int, first: int, noise: float) -> None:
        generator = torch.Generator().manual_seed(first)
        self.points = torch.randn(count, 6, generator=generator)
        self.labels = (self.points[:, 0] * self.points[:, 1] > 0).long() + 2 * (self.points[:, 2] > 0).long()
        self.noise = noise

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = torch.randn(6) + np.random.normal() + random.gauss(0, 1) if self.noise else 0
        return {"id": index, "point": self.points[index] + self.noise * noise, "label": self.labels[index]}


class Net(nn.Module):
    def __init__(self, settings: Any) -> None:
        super().__init__()
        width = settings.width
        self.enter = nn.Linear(6, width)
        self.norm = nn.BatchNorm1d(width) if settings.batchnorm else nn.Identity()
        self.middle = nn.Linear(width, width)
        self.again = nn.Linear(width, width)
        if settings.tied:
            self.again.weight = self.middle.weight
        self.dropout = nn.Dropout(settings.dropout)
        self.leave = nn.Linear(width, 4)

    def forward(self, points: Tensor) -> Tensor:
        hidden = torch.tanh(self.middle(torch.tanh(self.norm(self.enter(points)))))
        return self.leave(self.dropout(torch.tanh(self.again(hidden))))


def datasets(config: Any) -> tuple[Points, Points | None]:
    evaluation = config.task.evaluation
    _state["settings"] = config.task
    return Points(config.task.samples, 1, config.task.noise), Points(evaluation, 2, 0.0) if evaluation else None


def model(config: Any) -> nn.Module:
    return Net(config.task)


def loss(model: nn.Module, batch: Any) -> Any:
    settings = _state["settings"]
    if model.training:
        _act(_state["step"] + 1)
    each = nn.functional.cross_entropy(model(batch["point"]), batch["label"], reduction="none")
    if model.training and settings.poison in batch["id"].tolist():
        each = each / settings.poison_value if settings.poison_value >= 0 else each * math.nan
    if settings.counted:
        counts = (batch["id"] % 3 != 0).to(each.dtype)
        total = (each * counts).sum()
        return ((total, counts.sum()), {"ce": total, "three": 3 * total}) if settings.parts else (total, counts.sum())
    if settings.parts:
        zeros = (batch["label"] == 0).to(each.dtype)
        zero = (each * zeros).sum(), zeros.sum()
        parts = {"ce": each.mean(), "id": batch["id"].double().mean().item(), "zeros": zero}
        late = {"late": 0.0} if settings.parts == "late" and _script.with_name("late").exists() else {}
        return each.mean(), parts | late
    return each if _state.get("vector") else each.mean()


def metrics(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    found = {"accuracy": (model(batch["point"]).argmax(1) == batch["label"]).double().mean()}
    if _state["settings"].count_ids:
        found |= {f"id{n}": (batch["id"] == n).double().mean() for n in range(_state["settings"].evaluation)}
    return found


_state: dict[str, Any] = {"step": 0}
_script = Path(__spec__.origin).with_name("script")  # in the run folder, where the copy of this file lies
_plan = [line.split() for line in _script.read_text().splitlines()] if _script.exists() else []


def _act(step: int) -> None:
    """What the script says for this step, once."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    for line in [line for line in _plan if line[:2] == [str(step), str(rank)]]:
        _plan.remove(line)
        if line[2] == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (16384, resource.RLIM_INFINITY))
        elif line[2] == "copy":
            snapshot.SHARE = math.inf
        elif line[2] == "vector":
            _state["vector"] = True
        elif line[2] == "sh":
            subprocess.run(" ".join(line[3:]), shell=True, check=True)
        else:
            os.kill(os.getpid(), signal.Signals[line[2]])


def _count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if optimizer.param_groups[0]["lr"] > 0:  # torch makes a fresh optimizer's state by a step with rate 0
        _state["step"] += 1


if _plan:
    register_optimizer_step_post_hook(_count)

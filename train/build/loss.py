"""Validates what a task's `loss` and `metrics` return, for training and evaluation.

Both return the mean over the batch, or a pair (total, count): a sum and what it is divided by (tokens, say). A loss may
return its parts beside it, in a dict from names to such values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import TrainingFailed
from ..tasks import Task

_WIDE = (torch.float32, torch.float64)
MOST_PARTS = 32
"""Maximum number of parts of a loss: a checkpoint has room for so many (see build/updates.py)."""


@dataclass(slots=True)
class BatchValue:
    """The loss or a metric of one batch."""

    value: Tensor
    """The mean over the batch, or the total if there is a count: a scalar in at least fp32, with the graph."""
    samples: int
    """Number of samples in the batch."""
    count: Tensor | float | None
    """What the total is divided by; None: `value` is a mean over the samples."""
    parts: dict[str, BatchValue] = field(default_factory=dict)
    """The parts of a loss by name, without the graph."""

    @property
    def counts_itself(self) -> bool:
        """Whether the task returned a count."""
        return self.count is not None

    @property
    def weight(self) -> int:
        """Factor between `value` and the sum over the batch."""
        return 1 if self.counts_itself else self.samples

    def total(self, dtype: torch.dtype) -> Tensor:
        """Return the sum over the batch, without the graph."""
        value = self.value.detach()
        return (value if value.dtype == dtype else value.to(dtype)) * self.weight

    def counted(self) -> Tensor | float:
        """Return the count that belongs to the total."""
        return self.samples if self.count is None else self.count


def checked_value(value: Any, samples: int, what: str) -> BatchValue:
    """Check what a task's function returned.

    Args:
        what: names the loss or metric and its file, for messages.

    Raises:
        TrainingFailed: the value is neither a mean nor (total, count).
    """
    count = None
    if isinstance(value, tuple) and len(value) == 2:
        value, count = value
        if not (_is_scalar(value) and (_is_scalar(count) or isinstance(count, (int, float)))):
            raise TrainingFailed(
                f"{what} must return (total, count) as a scalar tensor and a number; "
                f"got ({kind_of(value)}, {kind_of(count)})"
            )
        if isinstance(count, Tensor) and count.requires_grad:
            raise TrainingFailed(
                f"{what} returns (total, count), but the count depends on the model's parameters; return the sum "
                "of two losses, or detach() the count"
            )
        count = count.detach().reshape(()) if isinstance(count, Tensor) else count
    if not _is_scalar(value):
        raise TrainingFailed(
            f"{what} must return a scalar tensor, the mean over the batch, or (total, count); got {kind_of(value)}"
        )
    if value.dim():
        value = value.reshape(())
    # bf16 rounds a third to 0.334, and fp16 ends at 65504: sums and weights take at least fp32
    return BatchValue(value if value.dtype in _WIDE else value.float(), samples, count)


def checked_loss(value: Any, samples: int, what: str) -> BatchValue:
    """Check what a task's loss returned, as `checked_value`, with its parts if it returned (loss, {"part": …})."""
    if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict)):
        return checked_value(value, samples, what)
    value, parts = value
    loss = checked_value(value, samples, what)
    if len(parts) > MOST_PARTS:
        raise TrainingFailed(f"{what} returns {len(parts)} parts; at most {MOST_PARTS} are logged")
    loss.parts = {name: _part(name, part, loss, what) for name, part in parts.items()}
    return loss


def _part(name: Any, value: Any, loss: BatchValue, what: str) -> BatchValue:
    """Check a part of a loss. Beside a mean it is a mean; beside (total, count) a total that is divided by the same
    count."""
    if not (isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name)):
        raise TrainingFailed(f"{what} names a part {name!r}; use letters, digits, _ and -")
    value, count = value if isinstance(value, tuple) and len(value) == 2 else (value, loss.count)
    value = torch.as_tensor(value, dtype=torch.float64) if isinstance(value, (int, float, np.number)) else value
    if not (_is_scalar(value) and (count is None or _is_scalar(count) or isinstance(count, (int, float)))):
        raise TrainingFailed(
            f"{what} returns for its part {name} {kind_of(value)}; give a scalar tensor or a number, or (total, count)"
        )
    value, count = value.detach().reshape(()), count.detach().reshape(()) if isinstance(count, Tensor) else count
    return BatchValue(value if value.dtype in _WIDE else value.float(), loss.samples, count)


def check_parts(known: Iterable[str], found: Iterable[str], what: str) -> None:
    """Check that a loss returned the parts that it returned before.

    Raises:
        TrainingFailed: it returned others.
    """
    known, found = [*known], [*found]
    if set(known) != set(found):
        raise TrainingFailed(
            f"{what} returned the parts {', '.join(found) or '(none)'}, but {', '.join(known) or '(none)'} before; "
            "return the same parts for every batch"
        )


def training_loss(
    function: Callable[[nn.Module, Any], Any], compute: Callable[[Callable[[nn.Module], Tensor]], Tensor], *,
    batch: Any, samples: int, what: str,
) -> BatchValue:  # fmt: skip
    """Compute the loss of a batch, to be differentiated.

    Args:
        function: the task's loss.
        what: its name and file, for messages.
        compute: the strategy's; calls a function with the model to compute with.

    Raises:
        TrainingFailed: the task returned no loss, or one that does not depend on the model.
    """
    made: list[BatchValue] = []

    def value_of(model: nn.Module) -> Tensor:
        loss = checked_loss(function(model, batch), samples, what)
        if not loss.value.requires_grad:
            raise TrainingFailed(f"{what} does not depend on the model's parameters: call model(...) in it")
        made.append(loss)
        return loss.value

    value = compute(value_of)
    made[0].value = value  # what the strategy made of it, with its hooks
    return made[0]


def evaluation_values(
    task: Task, model: nn.Module, *, inference: nn.Module, batch: Any, samples: int
) -> dict[str, BatchValue]:
    """Compute the loss and the metrics of a batch, by name: the loss, its parts as `loss.NAME`, the metrics.

    Where the metrics include `loss`, the task's loss is not called: one forward serves both.

    Args:
        inference: the model that metrics get: the model, or what the task's inference_model() makes of it.

    Raises:
        TrainingFailed: the task returns something else.
    """
    made = {} if task.metrics is None else task.metrics(inference, batch)
    if not isinstance(made, dict):
        raise TrainingFailed(f"metrics must return a dict from names to tensors, got {type(made).__name__}")
    if "loss" not in made and task.loss is not None:
        made = {"loss": task.loss(model, batch), **made}
    values = {}
    for name in sorted(made, key=lambda name: name != "loss"):
        value = made[name]
        if name != "loss" and isinstance(value, (int, float, np.number, np.ndarray)):
            value = torch.as_tensor(value)
        if name == "loss":
            loss = values[name] = checked_loss(value, samples, f"loss in {task.file}")
            values |= {f"loss.{part}": one for part, one in loss.parts.items()}
        elif name in values:
            raise TrainingFailed(f"metrics in {task.file} gives {name}, as a part of the loss; give it another name")
        else:
            values[name] = checked_value(value, samples, f"metric {name} in {task.file}")
    return values


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def kind_of(value: Any) -> str:
    """Describe a value, for messages."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a list of {len(value)}" if isinstance(value, list) else type(value).__name__

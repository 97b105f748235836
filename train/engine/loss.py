"""What a task's `loss` and `metrics` may return, read in one place for training and evaluation.

Both give the mean over the batch, or a pair (total, count): what they add up to, and over how much (tokens, say).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from train.errors import TrainingFailed
from train.tasks import Task

_WIDE = (torch.float32, torch.float64)


@dataclass(slots=True)
class Figure:
    """One figure of one batch."""

    value: Tensor
    """The mean over the batch, or the total where it counts by itself: a scalar, in fp32 at least; has the graph."""
    samples: int
    """Of the batch."""
    count: Tensor | float | None
    """What `value` adds up to counts so much; None: it is a mean over the samples."""

    @property
    def counts_itself(self) -> bool:
        """Whether it came with a count of its own."""
        return self.count is not None

    @property
    def weight(self) -> int:
        """What makes a sum over samples of `value`."""
        return 1 if self.counts_itself else self.samples

    def total(self, dtype: torch.dtype) -> Tensor:
        """The sum over the batch, without the graph."""
        value = self.value.detach()
        return (value if value.dtype == dtype else value.to(dtype)) * self.weight

    def counted(self) -> Tensor | float:
        """How much the total is the sum of."""
        return self.samples if self.count is None else self.count


def figure(value: Any, samples: int, what: str, file: Path) -> Figure:
    """Read what a task's function returned.

    Args:
        what: which figure, for the message.

    Raises:
        TrainingFailed: it is neither a mean nor (total, count).
    """
    count = None
    if isinstance(value, tuple) and len(value) == 2:
        value, count = value
        if not (_is_scalar(value) and (_is_scalar(count) or isinstance(count, (int, float)))):
            raise TrainingFailed(
                f"{what} in {file} must return (total, count) as a scalar tensor and a number; "
                f"got ({_kind(value)}, {_kind(count)})"
            )
        if isinstance(count, Tensor) and count.requires_grad:
            raise TrainingFailed(
                f"{what} in {file} returns a pair, which is (total, count), and its count depends on the model's "
                "parameters; of two losses return the sum; a count that is meant, detach()"
            )
        count = count.detach().reshape(()) if isinstance(count, Tensor) else count
    if not _is_scalar(value):
        raise TrainingFailed(
            f"{what} in {file} must return a scalar tensor, the mean over the batch, or (total, count); "
            f"got {_kind(value)}"
        )
    if value.dim():
        value = value.reshape(())
    # a third is 0.334 in bf16, and fp16 ends at 65504: sums and weights take at least fp32
    return Figure(value if value.dtype in _WIDE else value.float(), samples, count)


def training_loss(
    task: Task, compute: Callable[[Callable[[nn.Module], Tensor]], Tensor], batch: Any, samples: int
) -> Figure:
    """The loss of a batch, to be differentiated.

    Args:
        compute: of a strategy: gives the loss the model to compute with.

    Raises:
        TrainingFailed: it is none, or does not depend on the model.
    """
    found: list[Figure] = []

    def value_of(model: nn.Module) -> Tensor:
        one = figure(task.loss(model, batch), samples, "loss", task.file)
        if not one.value.requires_grad:
            raise TrainingFailed(
                f"loss in {task.file} does not depend on the model's parameters: call model(...) in it"
            )
        found.append(one)
        return one.value

    value = compute(value_of)
    found[0].value = value
    return found[0]


def evaluation_figures(task: Task, model: nn.Module, batch: Any, samples: int) -> dict[str, Figure]:
    """The loss and the metrics of a batch, by name, the loss first. Metrics get the answers that the model gave to the
    loss, where they ask it the same.

    Raises:
        TrainingFailed: the task returns something else.
    """
    if task.metrics is None:
        return {"loss": figure(task.loss(model, batch), samples, "loss", task.file)}
    heard: list[_Call] = []
    # of a compiled model, hooks are compiled, too: nothing is heard, and metrics compute by themselves
    listening = model.register_forward_hook(lambda *call: heard.append(_Call(*call[1:])), with_kwargs=True)
    try:
        figures = {"loss": figure(task.loss(model, batch), samples, "loss", task.file)}
    finally:
        listening.remove()
    made = task.metrics(_Answered(model, heard), batch)
    if not isinstance(made, dict):
        raise TrainingFailed(f"metrics must return a dict from names to tensors, got {type(made).__name__}")
    for name, value in made.items():
        given = value if isinstance(value, (Tensor, tuple)) else torch.as_tensor(value)
        figures[name] = figure(given, samples, f"metric {name}", task.file)
    return figures


class _Call:
    """What a model was asked, and its answer."""

    def __init__(self, arguments: tuple[Any, ...], named: dict[str, Any], answer: Any) -> None:
        self._asked, self.answer = tree_flatten((arguments, named)), answer
        self._versions = _versions(self._asked[0]), _versions(tree_leaves(answer))

    def answers(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """Whether the very same objects are asked about now, and neither they nor the answer have been changed."""
        now = _versions(self._asked[0]), _versions(tree_leaves(self.answer))
        return now == self._versions and _is_same(self._asked, tree_flatten((arguments, named)))


class _Answered(nn.Module):
    """A model that has been asked by the loss: the first call of metrics gets the answer of the loss's first call, the
    second that of the second, where they ask the same; a model may answer the same question in two ways.

    All else that metrics ask it for is the model's: what it lacks itself, its items, its parameters by its names; and
    what they set is set there.
    """

    def __init__(self, model: nn.Module, heard: list[_Call]) -> None:
        super().__init__()
        self.module = model
        self.training = model.training
        self._heard = iter(heard)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = next(self._heard, None)
        return call.answer if call is not None and call.answers(args, kwargs) else self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "module" not in self.__dict__.get("_modules", {}):  # torch asks for its own
                raise
            return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        is_own = "_heard" not in self.__dict__ or name == "training"
        super().__setattr__(name, value) if is_own else setattr(self.module, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self.module)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        return iter(self.module)  # type: ignore[call-overload]

    def __contains__(self, key: Any) -> bool:
        return key in self.module  # type: ignore[operator]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return self.module.named_buffers(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return self.module.named_modules(*args, **kwargs)


def _versions(leaves: list[Any]) -> list[int]:
    """How often each tensor was changed in place."""
    return [leaf._version for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]


def _is_same(one: tuple[list[Any], Any], other: tuple[list[Any], Any]) -> bool:
    return one[1] == other[1] and len(one[0]) == len(other[0]) and all(map(operator.is_, one[0], other[0]))


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _kind(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__

"""Asks a task's `order`, `weights` or `lengths` for the order of an epoch, and checks the answer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..config import Config
from ..data import sampling
from ..data.order import seed_of
from ..data.sampling import Indices
from ..data.seeding import owned, seed_host, seed_owned
from ..errors import Refused
from ..run.spec import Spec
from ..tasks import Task
from . import objects
from .loss import kind_of


def samples_of(spec: Spec, dataset: Any) -> int:
    """Return the number of samples of an epoch in a run, without calling the task's function."""
    return spec.samples if spec.sampler and spec.samples is not None else len(dataset)


def first_samples(task: Task, config: Config, size: int) -> int:
    """Return the number of samples of an epoch in a new run, from the first one.

    Args:
        size: samples of the training set.

    Raises:
        Refused: the task's function fails, or returns something wrong.
    """
    return len(orders(task, config, size)(0)) if task.sampler else size


def orders(task: Task, config: Config, size: int) -> Callable[[int], Indices]:
    """Return the function that computes the indices of an epoch (counted from 0), from the task's own function.

    Args:
        size: samples of the training set.
    """
    if task.order is not None:
        return lambda epoch: _given(task, config, size, epoch)
    numbers = functools.cache(lambda: _numbers(task, config, size, task.sampler))
    if task.weights is not None:
        return lambda epoch: sampling.weighted(numbers(), seed=config.seed, epoch=epoch)
    return lambda epoch: sampling.grouped(numbers(), seed=config.seed, epoch=epoch, batch_size=config.batch_size)


def _given(task: Task, config: Config, size: int, epoch: int) -> Indices:
    """Return the indices that `order` gives for an epoch."""
    made = _call(task, config, "order", epoch)
    is_whole = isinstance(made, Tensor) and made.dtype == torch.int64
    if not is_whole or made.dim() != 1:
        found = f"{kind_of(made)} of {made.dtype}" if isinstance(made, Tensor) else kind_of(made)
        raise Refused(
            f"order in {task.file} must return a LongTensor of one dimension with the indices of an epoch, got {found}"
        )
    indices: Indices = made.cpu().numpy().copy()  # the task may keep the tensor and change it
    if not len(indices):
        raise Refused(f"order in {task.file} returns no index for epoch {epoch}; return at least one")
    for index in (indices.min(), indices.max()):
        if not 0 <= index < size:
            raise Refused(
                f"order in {task.file} returns the index {index} for epoch {epoch}, but the training set has {size} "
                f"samples; return indices from 0 to {size - 1}"
            )
    return indices


def _numbers(task: Task, config: Config, size: int, name: str) -> npt.NDArray[np.float64]:
    """Return what `weights` or `lengths` gives: a number for each sample."""
    made = _call(task, config, name)
    what = f"{name} in {task.file} must return one number for each of the {size} samples of the training set"
    rename = f"; if it has another purpose, call it _{name}"
    try:
        numbers = np.array(made.detach().cpu().numpy() if isinstance(made, Tensor) else made, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError):
        raise Refused(f"{what}, got {kind_of(made)}{rename}") from None
    if numbers.shape != (size,):
        found = "x".join(map(str, numbers.shape)) if numbers.shape else kind_of(made)
        raise Refused(f"{what}, got {found}{rename}")
    for wrong, why in ((~np.isfinite(numbers), "not finite"), (numbers < 0, "negative")):
        if wrong.any():
            index = int(wrong.argmax())
            raise Refused(f"{name} in {task.file} returns {numbers[index]} for sample {index}, which is {why}")
    with np.errstate(over="ignore"):
        total = numbers.sum()
    if name == "weights" and not 0 < total < np.inf:
        raise Refused(f"weights in {task.file} add up to {total}; return numbers with a finite sum above 0")
    return numbers


def _call(task: Task, config: Config, name: str, *epoch: int) -> Any:
    """Call a function of the task, seeded. On one thread, because others sum in other orders."""
    # without an epoch the seed is that of datasets(): the function may call it, to look into the same data
    seed = seed_of(config.seed, "order", *epoch) if epoch else seed_of(config.data.seed, "datasets")
    function = getattr(task, name)
    seed_host(seed)
    seed_owned(owned(function), seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return objects.call(task, f"{name}()", function, *epoch, config)
    finally:
        torch.set_num_threads(threads)

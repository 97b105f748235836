"""`train.gather`: returns all ranks' rows, for losses over all samples of a step (contrastive ones)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import Config
from ..errors import Refused
from .world import World

_ranks: dict[str, Any] = {"world": None, "problem": ""}
"""The ranks while a run trains, and why they cannot gather."""
_IN_EVALUATION = (
    "train.gather depends on the number of ranks, but metrics of an evaluation must not; write in loss(): "
    "rows = train.gather(rows) if model.training else rows, or compare all samples in compute_metrics(predictions)"
)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, world: World) -> Tensor:
        ctx.world, ctx.rows = world, len(tensor)
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(world.size)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        own = slice(ctx.world.rank * ctx.rows, (ctx.world.rank + 1) * ctx.rows)
        return ctx.world.add(gradient.clone(memory_format=torch.contiguous_format))[own], None


def gather(tensor: Tensor) -> Tensor:
    """Return the rows of all ranks' tensors, in the order of the batch. Gradients flow back to all ranks.

    For a loss that compares its rows with those of all ranks and returns the mean over its own rows. On one rank and
    outside of a run it returns the given rows.

    Args:
        tensor: of shape (n, …), the same on all ranks.

    Raises:
        Refused: ranks may have different numbers of rows, or this is an evaluation on several ranks.
    """
    if _ranks["problem"]:
        raise Refused(_ranks["problem"])
    return tensor if _ranks["world"] is None or _ranks["world"].size == 1 else _Gather.apply(tensor, _ranks["world"])


def among(world: World, config: Config) -> contextlib.AbstractContextManager[None]:
    """Return a context manager in which losses gather among these ranks."""
    return _with(world, _problem(config, world.size))


def evaluating(ranks: int) -> contextlib.AbstractContextManager[None]:
    """Return a context manager for an evaluation of a run on this many ranks, whose figures must not depend on them."""
    return _with(None, _IN_EVALUATION if ranks > 1 else "")


@contextlib.contextmanager
def _with(world: World | None, problem: str) -> Iterator[None]:
    before = dict(_ranks)
    _ranks.update(world=world, problem=problem)
    try:
        yield
    finally:
        _ranks.update(before)


def _problem(config: Config, ranks: int) -> str:
    """Return why ranks may have different numbers of rows; '' if they all have the same."""
    assert isinstance(config.micro_batch_size, int)
    if config.parallel.reduce == "ordered":
        return (
            "train.gather depends on the number of ranks, but --parallel.reduce ordered must not; leave out one of them"
        )
    if config.data.leaves_out:
        return "train.gather needs every sample of a batch: leave out --data.on_error skip"
    if not config.data.drop_last:
        return "train.gather needs batches of one size: use --data.drop_last true"
    share = config.micro_batch_size * ranks
    if config.batch_size % share:
        return (
            f"train.gather needs micro batches that divide evenly among the ranks: --batch_size {config.batch_size} is "
            f"no multiple of micro_batch_size x ranks = {share}"
        )
    return ""

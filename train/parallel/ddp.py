"""DistributedDataParallel: a copy of the model on every rank, gradients reduced once a step, during the last backward.

This file handles what is special about DDP: it takes means where sums are wanted, it rebuilds its buckets after the
first backward, and the step's stats are in one of its buckets, so they cost no further communication.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .. import causes
from ..errors import TrainingFailed
from .strategy import STEP_STATS, Strategy
from .torch_private import after_gradients

_KNOWN = inspect.signature(DistributedDataParallel).parameters
NO_BUFFER_BROADCAST: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _KNOWN else "broadcast_buffers": False
}
"""Keeps DDP from broadcasting buffers in each forward. torch 2.13 warns of the older name."""


class _Forward(nn.Module):
    """The module that DDP wraps: the model, and one more parameter whose gradient carries the stats through the
    reduction.

    A forward computes the whole loss, not only the model: DDP reduces what its forward computes, and a loss that calls
    the model in another way (`model.encode(x)`) would silently leave each rank its own gradients.
    """

    def __init__(self, module: nn.Module, tail: nn.Parameter, touches: bool) -> None:
        """
        Args:
            touches: whether a pass without data uses every parameter.
        """
        super().__init__()
        self.module = module
        self.tail = tail
        self.touches = touches

    def forward(self, loss: Callable[[nn.Module], Tensor] | None) -> Tensor:
        """Return the value of a loss; without a loss, make a pass without data."""
        if loss is not None:
            return loss(self.module)
        # touches every parameter and no buffer. A chain, so that gradients become ready from the last parameter to
        # the first as in a real backward: DDP lays out its buckets in that order
        chain = self.tail.sum() * 0
        for parameter in self.module.parameters() if self.touches else ():
            if parameter.requires_grad:
                chain = chain + parameter.sum().to(chain.dtype)
        return chain


class DDPModule(DistributedDataParallel):
    """torch's DDP with our remedy in its error about unused parameters."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*inputs, **kwargs)
        except RuntimeError as error:
            if not causes.UNUSED.matches(str(error)):
                raise
            places = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            parameters = self.module.named_parameters()  # ddp numbers those that it reduces
            names = [name.removeprefix("module.") for name, one in parameters if one.requires_grad]
            raise _unused([names[int(place)] for place in (places[1].split() if places else ())]) from error


def _unused(names: list[str]) -> TrainingFailed:
    found = f"{', '.join(names[:3])}{' and others' if len(names) > 3 else ''}" if names else "a parameter"
    return TrainingFailed(
        "ddp needs a gradient of every parameter in every step, but the last backward of a step gave "
        f"{found} none; {causes.UNUSED.remedy}"
    )


class DDP(Strategy):
    """DDP over several ranks."""

    def _take(self, model: nn.Module) -> None:
        super()._take(model)
        world, parallel = self.world, self.config.parallel
        self._carries_stats = not parallel.find_unused_parameters
        # of the weights' type, so that it shares a bucket with them and costs no further reduction
        zeros = torch.zeros(len(STEP_STATS), dtype=self.stats_dtype, device=world.device)
        self._tail = nn.Parameter(zeros)
        self._more: tuple[Tensor, Any] | None = None
        """The sums of the stats that the tail has no place for (parts of a loss), and the communication of them."""
        # a pass without data must not give gradients of 0 to what no rank used: weight decay would reach it
        self._forward = _Forward(model, self._tail, touches=self._carries_stats)
        self._ddp = DDPModule(
            self._forward,
            device_ids=[world.device.index] if world.device.type == "cuda" else None,
            **NO_BUFFER_BROADCAST,  # scale_and_clip_gradients broadcasts them, once a step
            gradient_as_bucket_view=True,
            find_unused_parameters=parallel.find_unused_parameters,
        )

    def start(self) -> None:
        """Make DDP lay out its buckets before the first step, so that a resumed run sums in the same order.

        DDP rebuilds its buckets after the first backward. Without these two passes a resumed run on three or more ranks
        would sum its first step in another order than an uninterrupted run.
        """
        super().start()
        for _ in range(2):
            self._pass_without_data(torch.zeros_like(self._tail))
            self._clear()

    def micro_batch(self, number: int, is_last: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if is_last else self._ddp.no_sync()

    def compute(self, loss: Callable[[nn.Module], Tensor]) -> Tensor:
        value: Tensor = self._ddp(loss)
        return value

    def backward(self, value: Tensor | None, weight: float, stats: Tensor | None) -> None:
        if value is None:
            if stats is not None:
                with self.communication.waiting():  # nothing of this rank's is computed
                    self._pass_without_data(stats)
            return
        # DDP takes the mean over the ranks; weights are made for a sum
        root, gradient = self._root(value, weight * self.world.size)
        if stats is None:
            torch.autograd.backward(root, gradient)
            return
        computed: list[Any] = []
        root.register_hook(lambda _: after_gradients(lambda: computed.append(self.communication.mark())))
        self._reducing_backward(root, gradient, stats)
        if computed:
            self.communication.add(computed[0], self.communication.mark())

    def _pass_without_data(self, stats: Tensor) -> None:
        zero = self._ddp(None)
        self._reducing_backward(zero, torch.zeros_like(zero), stats)

    def _reducing_backward(self, root: Tensor, gradient: Tensor, stats: Tensor) -> None:
        """Run the backward pass that reduces gradients and stats."""
        self._more = None
        if self._carries_stats and len(stats) > len(self._tail):
            # not a longer tail: it would move the borders of buckets, and with them the bits of sums
            more, stats = stats[len(self._tail) :].clone(), stats[: len(self._tail)]
            self._more = more, dist.all_reduce(more, async_op=True)
        if self._carries_stats:
            torch.autograd.backward([root, self._tail], [gradient, stats * self.world.size])
        else:
            torch.autograd.backward(root, gradient)

    def reduce(self, stats: Tensor) -> Tensor:
        if not self._carries_stats:
            return super().reduce(stats)
        without = [name for name, parameter in self.named if parameter.grad is None]
        if without:  # then nothing has been reduced
            raise _unused(without)
        assert self._tail.grad is not None
        if self._more is None:
            return self._tail.grad.detach()
        more, adding = self._more
        with self.communication.waiting():
            adding.wait()
        return torch.cat([self._tail.grad.detach(), more])

    def not_finite(self) -> str:
        # a step that left a parameter out was not reduced, which DDP reports at the next forward: ask before a save
        if self._carries_stats:
            self._pass_without_data(torch.zeros_like(self._tail))
            self._clear()
        return super().not_finite()

    def _clear(self) -> None:
        super()._clear()
        self._tail.grad = None

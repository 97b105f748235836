"""DistributedDataParallel: a copy of the model on every rank, gradients reduced once a step, during the last backward.

What is DDP's alone stays here: that it takes means where sums are wanted, that it lays its buckets out anew after the
first backward, and that votes ride in a bucket, at no communication of their own.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from train.parallel.strategy import VOTES, Spread


class _Forward(nn.Module):
    """What DDP wraps: the model, and one more parameter whose gradient carries the votes through the reduction."""

    def __init__(self, module: nn.Module, tail: nn.Parameter) -> None:
        super().__init__()
        self.module = module
        self.tail = tail
        self.idle = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.idle:
            return self.module(*args, **kwargs)
        # touches every parameter and no buffer. A chain, so that gradients become ready from the last parameter to
        # the first as in a real backward: DDP lays out its buckets in that order
        chain = self.tail.sum() * 0
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                chain = chain + parameter.sum().to(chain.dtype)
        return chain


class Replicated(Spread):
    """DDP over several ranks."""

    def _take(self, model: nn.Module) -> None:
        super()._take(model)
        world, parallel = self.world, self.config.parallel
        self._rides = not parallel.find_unused_parameters
        # of the weights' type, so that it shares a bucket with them and costs no reduction of its own
        zeros = torch.zeros(len(VOTES), dtype=self.votes_type, device=world.device)
        self._tail = nn.Parameter(zeros, requires_grad=self._rides)
        self._forward = _Forward(model, self._tail)
        self.call = self._ddp = DistributedDataParallel(
            self._forward,
            device_ids=[world.device.index] if world.device.type == "cuda" else None,
            broadcast_buffers=False,  # agree_on_buffers does it, once a step
            gradient_as_bucket_view=True,
            find_unused_parameters=parallel.find_unused_parameters,
        )

    def start(self) -> None:
        """Let DDP lay out its buckets before the first step, so that a resumed run sums in the same order.

        DDP rebuilds its buckets after the first backward it sees; without these two passes a resumed run on three
        or more ranks would sum its first step in another order than the run that was never stopped.
        """
        for _ in range(2):
            self.idle(torch.zeros_like(self._tail))
            self.clear()

    def micro_batch(self, number: int, is_last: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if is_last else self._ddp.no_sync()

    def backward(self, value: Tensor, weight: float, votes: Tensor | None) -> None:
        # DDP takes the mean over the ranks; weights are made for a sum
        root, gradient = self._root(value, weight * self.world.size)
        if votes is None or not self._rides:
            torch.autograd.backward(root, gradient)
        else:
            torch.autograd.backward([root, self._tail], [gradient, votes * self.world.size])

    def idle(self, votes: Tensor) -> None:
        self._forward.idle = True
        try:
            zero = self._ddp()
        finally:
            self._forward.idle = False
        nothing = torch.zeros_like(zero)
        if self._rides:
            torch.autograd.backward([zero, self._tail], [nothing, votes * self.world.size])
        else:
            torch.autograd.backward(zero, nothing)

    def reduce(self, votes: Tensor) -> Tensor:
        if self._rides:
            assert self._tail.grad is not None
            return self._tail.grad.detach()
        return self.world.add(votes)

    def clear(self) -> None:
        super().clear()
        self._tail.grad = None

"""One rank's copy of the model under DDP."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from train.config import Config
from train.errors import TrainingFailed
from train.parallel.precision import Precision
from train.parallel.world import World

TAIL = ("loss", "count", "stop", "save", "counted")
"""Numbers that are summed over the ranks together with the gradients, at no further communication."""


class _Forward(nn.Module):
    """What DDP wraps: the model, and one more parameter whose gradient carries TAIL through the reduction."""

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


class Replica:
    """One rank's copy of the model.

    `module` is the model itself (evaluation, checkpoints); `call` is what a training loss calls.
    """

    def __init__(self, module: nn.Module, world: World, config: Config, precision: Precision) -> None:
        self.module, self.world = module, world
        self.trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if not self.trainable:
            raise TrainingFailed("the model has no parameter to train; check model() of the task")
        self._scaler = precision.scaler
        self._weights: dict[tuple[float, torch.dtype], Tensor] = {}
        self._buffers = [buffer for buffer in module.buffers() if buffer.numel()]
        self._rides = world.size > 1 and not config.parallel.find_unused_parameters
        # of the weights' type, so that it shares a bucket with them and costs no reduction of its own
        zeros = torch.zeros(len(TAIL), dtype=precision.weights, device=world.device)
        self.tail = nn.Parameter(zeros, requires_grad=self._rides)
        self._ddp: DistributedDataParallel | None = None
        self._forward = _Forward(module, self.tail)
        self.call: nn.Module = module
        if world.size > 1:
            self._ddp = DistributedDataParallel(
                self._forward,
                device_ids=[world.device.index] if world.device.type == "cuda" else None,
                broadcast_buffers=False,  # sync_buffers does it, once a step
                gradient_as_bucket_view=True,
                find_unused_parameters=config.parallel.find_unused_parameters,
            )
            self.call = self._ddp

    def settle(self) -> None:
        """Let DDP lay out its buckets before the first step, so that a resumed run sums in the same order.

        DDP rebuilds its buckets after the first backward it sees; without these two passes a resumed run on three
        or more ranks would sum its first step in another order than the run that was never stopped.
        """
        for _ in range(2 if self._ddp is not None else 0):
            self._idle_backward(torch.zeros_like(self.tail))
            self.clear()

    def clear(self) -> None:
        """Forget the gradients."""
        for parameter in self.trainable:
            parameter.grad = None
        self.tail.grad = None

    def sync_buffers(self) -> None:
        """Give every rank rank 0's buffers, so that what a checkpoint holds is what every rank continues with."""
        if self._ddp is None or not self._buffers:
            return
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self._buffers:
            by_type.setdefault(buffer.dtype, []).append(buffer)
        with torch.no_grad():
            for buffers in by_type.values():
                flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
                dist.broadcast(flat, src=0)
                if not self.world.is_first:
                    for buffer, part in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                        buffer.copy_(part.view_as(buffer))

    @contextlib.contextmanager
    def accumulating(self, more: bool) -> Iterator[None]:
        """While `more` micro batches of this step follow, gradients are added up here and not yet reduced."""
        with self._ddp.no_sync() if more and self._ddp is not None else contextlib.nullcontext():
            yield

    def backward(self, value: Tensor, weight: float, tail: Tensor | None) -> None:
        """Add the gradient of `value` times `weight`; with a tail, reduce over the ranks."""
        weight *= self.world.size  # DDP takes the mean over the ranks; weights are made for a sum
        key = (weight, value.dtype)
        gradient = self._weights.get(key)
        if gradient is None:
            gradient = self._weights[key] = torch.tensor(weight, dtype=value.dtype, device=value.device)
        if self._scaler is not None:
            value = self._scaler.scale(value)
        if tail is None or not self._rides:
            torch.autograd.backward(value, gradient)
        else:
            torch.autograd.backward([value, self.tail], [gradient, tail * self.world.size])

    def backward_without_data(self, tail: Tensor) -> None:
        """The last backward of a step in which this rank has no micro batch left: weight 0, no buffer changes."""
        if self._ddp is not None:
            self._idle_backward(tail)
        elif all(parameter.grad is None for parameter in self.trainable):  # as several ranks would have them
            for parameter in self.trainable:
                parameter.grad = torch.zeros_like(parameter)

    def _idle_backward(self, tail: Tensor) -> None:
        assert self._ddp is not None
        self._forward.idle = True
        try:
            zero = self._ddp()
        finally:
            self._forward.idle = False
        nothing = torch.zeros_like(zero)
        if self._rides:
            torch.autograd.backward([zero, self.tail], [nothing, tail * self.world.size])
        else:
            torch.autograd.backward(zero, nothing)

    def reduced(self, tail: Tensor) -> Tensor:
        """TAIL summed over the ranks, after the last backward of a step."""
        if self._rides:
            assert self.tail.grad is not None
            return self.tail.grad.detach()
        return self.world.add(tail)

    def scale_gradients(self, by: Tensor) -> None:
        """Multiply every gradient with a scalar tensor."""
        gradients = [parameter.grad for parameter in self.trainable if parameter.grad is not None]
        torch._foreach_mul_(gradients, by)

"""How a model is spread: the ranks of a run and the copy of the model that each of them trains."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from train.config import Config
from train.engine.precision import Precision
from train.errors import Refused, TrainingFailed, one_line

T = TypeVar("T")

TAIL = ("loss", "count", "stop", "save", "counted")
"""Numbers that are summed over the ranks together with the gradients, at no further communication."""


class World:
    """The ranks of a run as one of them sees them."""

    def __init__(self, rank: int, size: int, local_rank: int, device: torch.device) -> None:
        self.rank, self.size, self.local_rank, self.device = rank, size, local_rank, device
        self.group: Any = None
        """The process group of the collectives below; None is the default one."""
        self.timeout: datetime.timedelta | None = None
        """How long a collective may take; None is torch's default."""

    def with_own_group(self) -> World:
        """The same ranks with a group on the CPU of its own, for collectives of another thread. A collective."""
        other = World(self.rank, self.size, self.local_rank, torch.device("cpu"))
        other.timeout = self.timeout
        other.group = dist.new_group(backend="gloo", timeout=self.timeout) if self.size > 1 else None
        return other

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.group)

    def share(self, value: T | None) -> T:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value  # type: ignore[return-value]
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]  # type: ignore[return-value]

    def on_first(self, action: Callable[[], T]) -> T:
        """What `action` returns when rank 0 alone runs it; an OSError or refusal of it is raised on every rank."""
        result: T | None = None
        error: Exception | None = None
        if self.is_first:
            try:
                result = action()
            except (OSError, Refused, TrainingFailed) as caught:
                error = caught
        result, error = self.share((result, error))
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def add(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether the flag is up on any rank."""
        if self.size == 1:
            return flag
        return bool(self.add(torch.tensor(float(flag), device=self.device)).item())


def pick_device(config: Config, ranks_here: int, local_rank: int) -> torch.device:
    """The device of a rank.

    Raises:
        Refused: a GPU is asked for and there is none, or there are more ranks than GPUs.
    """
    gpus = torch.cuda.device_count() if config.device != "cpu" else 0
    if config.device == "cuda" and gpus == 0:
        raise Refused("device cuda is asked for, but torch sees no GPU here; leave out --device, or see nvidia-smi")
    if gpus == 0:
        return torch.device("cpu")
    if ranks_here > gpus:
        raise Refused(f"{ranks_here} ranks need {ranks_here} GPUs, but {gpus} are usable here; use --nproc {gpus}")
    return torch.device("cuda", local_rank)


def take_device(config: Config, ranks_here: int, local_rank: int) -> torch.device:
    """`pick_device`, and what this process does on a GPU from now on it does on that one.

    Raises:
        Refused: see `pick_device`.
    """
    device = pick_device(config, ranks_here, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def join(
    config: Config, rank: int, size: int, local_rank: int, local_size: int, device: torch.device, init: Any = "env://"
) -> World:
    """Meet the other ranks; `init` says where: an init_method of torch.distributed, or a store."""
    timeout = datetime.timedelta(minutes=config.parallel.timeout_minutes)
    if size > 1:
        if local_size == size:
            # a host whose own name resolves to nothing reachable is common; its loopback always is
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            **({"init_method": init} if isinstance(init, str) else {"store": init}),
            rank=rank,
            world_size=size,
            timeout=timeout,
            **options,
        )
    world = World(rank, size, local_rank, device)
    world.timeout = timeout
    return world


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


def describe_failure(error: BaseException) -> str:
    """An exception as one line."""
    return one_line(f"{type(error).__name__}: {error}")[:600]

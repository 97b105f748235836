"""The ranks of a run as one of them sees them, and the device that it computes on."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from train.config import Config
from train.errors import Refused, TrainingFailed

T = TypeVar("T")


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

    def share(self, value: T | None, source: int = 0) -> T:
        """The value of one rank, rank 0 if no other is named, on every rank."""
        if self.size == 1:
            return value  # type: ignore[return-value]
        box = [value]
        dist.broadcast_object_list(box, src=source, group=self.group)
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

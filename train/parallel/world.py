"""The ranks of a run as one of them sees them, and their collectives."""

from __future__ import annotations

import copy
import datetime
import functools
import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .. import variables
from ..config import Config
from ..errors import Refused, TrainingFailed
from .devices import prepare_nccl
from .rank_env import RankEnv

T = TypeVar("T")
log = logging.getLogger("train")


class World:
    """The ranks of a run as one of them sees them.

    Args:
        nodes: number of machines, each with its own run folder.
        local_size: number of ranks of this machine; None: all.
    """

    def __init__(
        self,
        rank: int,
        *,
        size: int,
        local_rank: int,
        device: torch.device,
        nodes: int = 1,
        local_size: int | None = None,
    ) -> None:
        self.rank, self.size, self.local_rank, self.device, self.nodes = rank, size, local_rank, device, nodes
        self.local_size = size if local_size is None else local_size
        self.group: Any = None
        """The process group of the collectives below; None: the default one."""
        self.timeout: datetime.timedelta | None = None
        """How long a collective may take; None: torch's default."""

    def with_own_group(self, timeout: datetime.timedelta | None = None) -> World:
        """Return the same ranks with another group on the CPU, for collectives of another thread. A collective."""
        other = copy.copy(self)
        other.device, other.timeout = torch.device("cpu"), timeout or self.timeout
        other.group = dist.new_group(backend="gloo", timeout=other.timeout) if self.size > 1 else None
        return other

    @functools.cached_property
    def patient(self) -> World:
        """The same ranks with a group that waits for rank 0 as long as it lives. A collective when it is first used."""
        return self.with_own_group(datetime.timedelta(days=365))

    @functools.cached_property
    def beside(self) -> World:
        """The same ranks with a group that no code of a task uses. A collective when it is first used."""
        return self.with_own_group()

    def of_rank_0(self) -> World:
        """Return rank 0 without the others, for what it does alone."""
        return World(0, size=1, local_rank=0, device=self.device)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_lead(self) -> bool:
        """Whether this is the first rank that has its run folder."""
        return self.is_first if self.nodes == 1 else self.local_rank == 0

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.group)

    def broadcast(self, value: T | None) -> T:
        """Return rank 0's value on every rank."""
        if self.size == 1:
            return value  # type: ignore[return-value]
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]  # type: ignore[return-value]

    def on_first(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 alone. Returns its result, and raises its OSError or refusal, on every rank."""
        result, error = self.broadcast(_tried(action) if self.is_first else None)
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def on_leads(self, action: Callable[[], object]) -> None:
        """Run `action` on the first rank of each machine. An OSError or refusal of any is raised on every rank."""
        for error in self.gather(_tried(action)[1] if self.is_lead else None):
            if error is not None:
                raise error

    def gather(self, value: T) -> list[T]:
        """Return every rank's value on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_on_first(self, value: T) -> list[T]:
        """Return every rank's value on rank 0; [] on the others."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size if self.is_first else []
        dist.gather_object(value, values if self.is_first else None, dst=0, group=self.group)
        return values

    def add(self, tensor: Tensor) -> Tensor:
        """Sum the tensor over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether the flag is true on any rank."""
        if self.size == 1:
            return flag
        # on the host, wherever is computed: a device would first compute all that is queued there
        return bool(self.add(torch.tensor(float(flag))).item())


def _tried(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return what an action returns, or its error that all ranks will raise."""
    try:
        return action(), None
    except (OSError, Refused, TrainingFailed) as error:
        return None, error


def join(config: Config, rank_env: RankEnv, device: torch.device) -> World:
    """Meet the other ranks, as the rank env says. A collective."""
    init = rank_env.init
    timeout = datetime.timedelta(minutes=config.parallel.timeout_minutes)
    if rank_env.size > 1:
        if rank_env.nodes == 1 and rank_env.local_size == rank_env.size:
            warning = variables.keep_gloo_at_home(os.environ)
            if warning and rank_env.rank == 0:
                log.warning("warning: %s", warning)
        options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
        if device.type == "cuda":
            prepare_nccl(config.deterministic)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            **({"init_method": init} if isinstance(init, str) else {"store": init() if callable(init) else init}),
            rank=rank_env.rank,
            world_size=rank_env.size,
            timeout=timeout,
            **options,
        )
    world = World(
        rank_env.rank,
        size=rank_env.size,
        local_rank=rank_env.local_rank,
        device=device,
        nodes=rank_env.nodes,
        local_size=rank_env.local_size,
    )
    world.timeout = timeout
    return world

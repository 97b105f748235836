"""The ranks of a run as one of them sees them, and their collectives."""

from __future__ import annotations

import datetime
import functools
import itertools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from train.config import Config
from train.errors import Refused, TrainingFailed
from train.parallel.devices import prepare_nccl
from train.parallel.seat import Seat

T = TypeVar("T")


class World:
    """The ranks of a run as one of them sees them.

    Args:
        leads: the first rank of each machine, in order.
    """

    def __init__(
        self, rank: int, size: int, local_rank: int, device: torch.device, leads: tuple[int, ...] = (0,)
    ) -> None:
        self.rank, self.size, self.local_rank, self.device, self.leads = rank, size, local_rank, device, leads
        self.group: Any = None
        """The process group of the collectives below; None is the default one."""
        self.timeout: datetime.timedelta | None = None
        """How long a collective may take; None is torch's default."""
        self.node: World = self
        """The ranks of this machine, which share a run folder."""
        self.between: Any = None
        """On several machines, the process group of their first ranks, on the CPU."""
        self._base = 0
        """What is rank 0 here is this one of the default group."""

    def with_own_group(self) -> World:
        """The same ranks with a group on the CPU of its own, for collectives of another thread. A collective."""
        other = World(self.rank, self.size, self.local_rank, torch.device("cpu"), self.leads)
        other.timeout = self.timeout
        other.group = dist.new_group(backend="gloo", timeout=self.timeout) if self.size > 1 else None
        other.find_node()
        return other

    def find_node(self) -> None:
        """Make the group of this machine's ranks, and that of the machines' first ones. A collective."""
        if len(self.leads) == 1:
            return
        # each rank makes two groups, and is in both: with a device, whoever is in none splits NCCL's, and waits for all
        # others to do so; and names of groups go by how many a rank has (torch 2.7)
        new = functools.partial(dist.new_group, backend="gloo", timeout=self.timeout, use_local_synchronization=True)
        for lead, end in itertools.pairwise((*self.leads, self.size)):
            if lead <= self.rank < end:
                self.node = World(self.rank - lead, end - lead, self.local_rank, torch.device("cpu"))
                self.node.timeout, self.node._base = self.timeout, lead
                self.node.group = new(list(range(lead, end)))
        alike = [rank for rank in range(self.size) if (rank in self.leads) == self.is_lead]
        group = new(alike)
        self.between = group if self.is_lead else None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_lead(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self.rank in self.leads

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.group)

    def share(self, value: T | None, source: int = 0) -> T:
        """The value of one rank, rank 0 if no other is named, on every rank."""
        if self.size == 1:
            return value  # type: ignore[return-value]
        box = [value]
        dist.broadcast_object_list(box, src=self._base + source, group=self.group)
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

    def on_leads(self, action: Callable[[], T]) -> T:
        """What `action` returns when the first rank of each machine runs it; an OSError or refusal of any of them is
        raised on every rank."""
        if len(self.leads) == 1:
            return self.on_first(action)
        result: T | None = None
        error: Exception | None = None
        try:
            result = self.node.on_first(action)
        except (OSError, Refused, TrainingFailed) as caught:
            error = caught
        for each in self.gather(error):
            if each is not None:
                raise each
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

    def is_everywhere(self, flag: bool) -> bool:
        """Whether the flag is true on every rank."""
        return not self.any(not flag)

    def any(self, flag: bool) -> bool:
        """Whether the flag is true on any rank."""
        if self.size == 1:
            return flag
        # on the host, wherever is computed: a device would first compute all that is queued there
        return bool(self.add(torch.tensor(float(flag))).item())


def join(config: Config, seat: Seat, device: torch.device) -> World:
    """Meet the other ranks, where the seat says. A collective."""
    init = seat.init
    timeout = datetime.timedelta(minutes=config.parallel.timeout_minutes)
    if seat.size > 1:
        if len(seat.leads) == 1 and seat.local_size == seat.size:
            # a host whose own name resolves to nothing reachable is common; its loopback always is
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
        if device.type == "cuda":
            prepare_nccl(config.deterministic)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            **({"init_method": init} if isinstance(init, str) else {"store": init() if callable(init) else init}),
            rank=seat.rank,
            world_size=seat.size,
            timeout=timeout,
            **options,
        )
    world = World(seat.rank, seat.size, seat.local_rank, device, seat.leads)
    world.timeout = timeout
    world.find_node()
    return world

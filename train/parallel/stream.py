"""Sums of gradients that travel while the backward pass that makes them goes on.

For `parallel.reduce ordered`, where the ranks are a power of two and each has as many micro batches: then a rank holds
one subtree of the sum, and the rest is added level by level in pairs of ranks, r with r ^ 1, r ^ 2, r ^ 4, … An
all-reduce over two ranks gives a + b whichever of them adds, so every level is one, without a copy on its way.

Gradients are gathered in buckets, from the last parameter to the first as a backward pass makes them. A bucket is sent
when it and all before it are complete, and goes on to its next level only after those before it have: so all ranks call
the same collectives of a pair in the same order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from train.parallel.world import World

_FIRST, _REST = 1 << 20, 25 << 20
"""Bytes from which a bucket is full: a small one to begin with, as DDP has."""


class _Bucket:
    """Tensors of one type in one message."""

    def __init__(self) -> None:
        self.members: list[int] = []
        self.missing = 0
        self.flat = torch.empty(0)
        self.work: Any = None
        self.level = -1
        """That of the sum it is on its way to; -1: not sent."""


def lying_as(flat: Tensor, like: Tensor) -> Tensor:
    """A flat tensor in the shape of another one, and in memory as that lies: a fused optimizer's kernel asks for it."""
    return (
        flat.as_strided(like.shape, like.stride(), flat.storage_offset()) if _is_last(like) else flat.view(like.shape)
    )


def flat_as(tensor: Tensor, like: Tensor) -> Tensor:
    """What `lying_as` makes a tensor from."""
    return (tensor.permute(0, 2, 3, 1) if _is_last(like) else tensor).reshape(-1)


def _is_last(like: Tensor) -> bool:
    """Whether channels lie last in memory."""
    is_last = like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last)
    return is_last and not like.is_contiguous()


def levels(world: int) -> int | None:
    """How many levels of pairs there are; None: the ranks are no power of two."""
    return world.bit_length() - 1 if world & (world - 1) == 0 else None


class Stream:
    """The sum of each of several tensors over all ranks, in the order of a binary tree over the ranks."""

    def __init__(self, world: World, like: list[Tensor]) -> None:
        """A collective.

        Args:
            like: of the shapes and types of what is added.
        """
        count = levels(world.size)
        assert count is not None
        self._groups = []
        for level in range(count):
            pair = sorted((world.rank, world.rank ^ 1 << level))
            self._groups.append(dist.new_group(pair, timeout=world.timeout, use_local_synchronization=True))
        self._device = world.device
        self._side = torch.cuda.Stream(world.device) if world.device.type == "cuda" else None
        """Where a GPU adds, one bucket after the other: all ranks call in one order, and the host waits for none."""
        self.views: list[Tensor] = list(like)
        """Where each tensor is written to, and its sum read from."""
        self._buckets = self._laid_out(like)
        self._of = {member: bucket for bucket in self._buckets for member in bucket.members}
        self.begin()

    def _laid_out(self, like: list[Tensor]) -> list[_Bucket]:
        buckets: list[_Bucket] = []
        open_: dict[torch.dtype, _Bucket] = {}
        sizes: dict[int, int] = {}
        for member in reversed(range(len(like))):
            dtype = like[member].dtype
            bucket = open_.get(dtype)
            if bucket is None:
                bucket = open_[dtype] = _Bucket()
                buckets.append(bucket)
            bucket.members.append(member)
            sizes[id(bucket)] = sizes.get(id(bucket), 0) + like[member].nbytes
            if sizes[id(bucket)] >= (_FIRST if bucket is buckets[0] else _REST):
                del open_[dtype]
        for bucket in buckets:
            counts = [like[member].numel() for member in bucket.members]
            bucket.flat = torch.empty(sum(counts), dtype=like[bucket.members[0]].dtype, device=self._device)
            for member, part in zip(bucket.members, bucket.flat.split(counts), strict=True):
                self.views[member] = lying_as(part, like[member])
        return buckets

    def begin(self) -> None:
        """Make ready for the next sums."""
        self._here = [False] * len(self.views)
        self._sent = 0
        for bucket in self._buckets:
            bucket.missing, bucket.work, bucket.level = len(bucket.members), None, -1

    def is_here(self, member: int) -> bool:
        """Whether this rank's part of a tensor has been written."""
        return self._here[member]

    def written(self, member: int) -> None:
        """This rank's part of a tensor lies in its view now. Sends what can be sent."""
        self._here[member] = True
        self._of[member].missing -= 1
        while self._sent < len(self._buckets) and not self._buckets[self._sent].missing:
            self._send(self._buckets[self._sent])
            self._sent += 1
        if self._side is None:
            self._go_on()

    def _send(self, bucket: _Bucket) -> None:
        if self._side is None:
            return self._next_level(bucket)
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            for group in self._groups:
                dist.all_reduce(bucket.flat, group=group)
        bucket.level = len(self._groups)
        return None

    def _next_level(self, bucket: _Bucket) -> None:
        bucket.level += 1
        bucket.work = None
        if bucket.level < len(self._groups):
            bucket.work = dist.all_reduce(bucket.flat, group=self._groups[bucket.level], async_op=True)

    def _go_on(self) -> None:
        """Let buckets go to their next levels as far as they can without waiting."""
        before = len(self._groups)
        for bucket in self._buckets[: self._sent]:
            while bucket.level < before and bucket.work is not None and bucket.work.is_completed():
                bucket.work.wait()
                self._next_level(bucket)
            before = bucket.level

    def finish(self) -> None:
        """Wait until all sums are in their views. Every part must have been written."""
        assert self._sent == len(self._buckets)
        if self._side is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._side)
        for level in range(len(self._groups)):
            for bucket in self._buckets:
                if bucket.level == level:
                    bucket.work.wait()
                    self._next_level(bucket)

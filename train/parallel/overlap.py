"""Communication that overlaps with computing: bucketed sums during the backward pass, and the time it still costs."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .world import World

_FIRST_BUCKET, _OTHER_BUCKETS = 1 << 20, 25 << 20
"""Bytes at which a bucket is full. The first bucket is small, as in DDP."""


class DeviceTimer:
    """Measures seconds between marks: by the host's clock on a CPU, by CUDA events on a GPU, because the host runs
    ahead of it.

    Nothing waits for an event: the time between two events is counted once the GPU has passed both.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._seconds = 0.0
        self._pending: collections.deque[tuple[Any, Any]] = collections.deque()
        self._free: list[Any] = []
        """Events for reuse: making one costs as much as recording it."""

    def mark(self) -> Any:
        """Return a mark of this moment, on a GPU in the order of its stream. For one `add`."""
        if not self._is_cuda:
            return time.perf_counter()
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, begun: Any, ended: Any) -> None:
        """Count the time between two marks."""
        if self._is_cuda:
            self._pending.append((begun, ended))
            self._collect()  # not all ranks ask for the seconds
        else:
            self._seconds += ended - begun

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Context manager that counts the time of a collective that does not overlap with computing."""
        begun = self.mark()
        yield
        self.add(begun, self.mark())

    def drop(self, mark: Any) -> None:
        """Give back a mark that is not to be counted."""
        if self._is_cuda:
            self._free.append(mark)

    def seconds(self) -> float:
        """Return the seconds so far, on a GPU up to its finished work. Does not wait."""
        self._collect()
        return self._seconds

    def _collect(self) -> None:
        while self._pending and self._pending[0][1].query():
            begun, ended = self._pending.popleft()
            self._seconds += begun.elapsed_time(ended) / 1e3
            self._free += begun, ended


class _Bucket:
    """Tensors of one type that are sent in one message."""

    def __init__(self) -> None:
        self.members: list[int] = []
        self.missing = 0
        self.flat = torch.empty(0)
        self.work: Any = None
        self.level = -1
        """The level whose all-reduce is running; -1: not sent yet."""


def view_as(flat: Tensor, like: Tensor) -> Tensor:
    """Return a view of a flat tensor with another one's shape and memory layout, which a fused optimizer's kernel
    needs."""
    if _is_channels_last(like):
        return flat.as_strided(like.shape, like.stride(), flat.storage_offset())
    return flat.view(like.shape)


def flatten_as(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the flat tensor that `view_as` takes."""
    return (tensor.permute(0, 2, 3, 1) if _is_channels_last(like) else tensor).reshape(-1)


def _is_channels_last(like: Tensor) -> bool:
    return like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last) and not like.is_contiguous()


def pair_levels(world: int) -> int | None:
    """Return the number of levels of pairs for this many ranks; None if they are not a power of two."""
    return world.bit_length() - 1 if world & (world - 1) == 0 else None


def _pair_group(world: World, distance: int) -> Any:
    """Return the group of this rank and the one at a distance. A collective of all ranks, which make all pairs.

    NCCL splits the communicator of all ranks in one call. A rank that made only its own pair would leave the others
    waiting in that split.
    """
    pairs = [[rank, rank + distance] for rank in range(world.size) if not rank & distance]
    if world.device.type == "cuda":
        return dist.split_group(split_ranks=pairs, timeout=world.timeout)
    return dist.new_subgroups_by_enumeration(pairs, timeout=world.timeout)[0]


class OverlappedSums:
    """Sums several tensors over all ranks, in the order of a binary tree over the ranks, during the backward pass.

    For `parallel.reduce ordered` with a power of two ranks, each with as many micro batches: then a rank holds one
    subtree of the sum, and the rest is added level by level in pairs of ranks, r with r ^ 1, r ^ 2, r ^ 4, … An
    all-reduce over two ranks gives a + b whichever of them adds, so every level is one.

    Gradients are gathered in buckets, from the last parameter to the first as a backward pass makes them. A bucket is
    sent when it and all before it are complete, and enters its next level only after those before it have: so all
    ranks call the same collectives of a pair in the same order.
    """

    def __init__(self, world: World, like: list[Tensor]) -> None:
        """A collective.

        Args:
            like: tensors with the shapes and types of what is added.
        """
        count = pair_levels(world.size)
        assert count is not None
        self._groups = [_pair_group(world, 1 << level) for level in range(count)]
        self._device = world.device
        self._side = torch.cuda.Stream(world.device) if world.device.type == "cuda" else None
        """The stream on which a GPU adds one bucket after the other. All ranks call in one order, and the host waits
        for none."""
        self.views: list[Tensor] = list(like)
        """The place of each tensor: the part is written there, and the sum is read from it."""
        self._buckets = self._lay_out(like)
        self._bucket_of = {member: bucket for bucket in self._buckets for member in bucket.members}
        self.begin()

    def _lay_out(self, like: list[Tensor]) -> list[_Bucket]:
        buckets: list[_Bucket] = []
        filling: dict[torch.dtype, tuple[_Bucket, int]] = {}
        for member in reversed(range(len(like))):
            dtype = like[member].dtype
            bucket, size = filling.pop(dtype, (None, 0))
            if bucket is None:
                bucket = _Bucket()
                buckets.append(bucket)
            bucket.members.append(member)
            size += like[member].nbytes
            if size < (_FIRST_BUCKET if bucket is buckets[0] else _OTHER_BUCKETS):
                filling[dtype] = bucket, size
        for bucket in buckets:
            counts = [like[member].numel() for member in bucket.members]
            bucket.flat = torch.empty(sum(counts), dtype=like[bucket.members[0]].dtype, device=self._device)
            for member, part in zip(bucket.members, bucket.flat.split(counts), strict=True):
                self.views[member] = view_as(part, like[member])
        return buckets

    def begin(self) -> None:
        """Make ready for the next sums."""
        self._sent = 0
        for bucket in self._buckets:
            bucket.missing, bucket.work, bucket.level = len(bucket.members), None, -1

    def written(self, member: int) -> None:
        """Call when this rank's part of a tensor is in its view. Sends each complete bucket."""
        self._bucket_of[member].missing -= 1
        while self._sent < len(self._buckets) and not self._buckets[self._sent].missing:
            self._send(self._buckets[self._sent])
            self._sent += 1
        if self._side is None:
            self._advance()

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

    def _advance(self) -> None:
        """Start the next levels of buckets, as far as possible without waiting."""
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

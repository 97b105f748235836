"""Host memory to which a state is copied, so that training continues while the copy is written.

One buffer of exactly the size that is needed, in which every tensor has its place; pinned as a whole where the state
lies on a GPU. (torch's own pinned memory comes in powers of two, for each tensor.) What several ranks hold alike is
first divided among them, so that each copies and has memory for only its part.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import math
import mmap
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ..data.to_device import mapped
from ..parallel.strategy import local

log = logging.getLogger("train")

_ALIGN = 64
"""Alignment of a place in bytes: a line of the processor's cache."""
Path = tuple[str, ...]


def own_part(state: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    """Return the part of a state that a rank writes: all that only this rank holds, and its share of what several ranks
    hold alike.

    A plain tensor is equal on all ranks; a DTensor on those that differ only in dimensions of the mesh over which it is
    replicated. Each tensor goes to the rank among them that has least so far, the large ones first. Everything but
    tensors stays on every rank. Every rank computes the same division, without communication.
    """
    loads: dict[int, list[int]] = {}
    keeps: dict[Path, bool] = {}
    tensors = list(_tensors(state))
    for path, tensor in sorted(tensors, key=lambda found: (-local(found[1]).nbytes, found[0])):
        number, copies = _copy_of(tensor, rank, size)
        load = loads.setdefault(copies, [0] * copies)
        owner = load.index(min(load))
        load[owner] += local(tensor).nbytes
        keeps[path] = owner == number

    def part(value: Any, path: Path) -> Any:
        if isinstance(value, dict):
            return {
                key: part(inner, (*path, str(key)))
                for key, inner in value.items()
                if keeps.get((*path, str(key)), True)
            }
        return value

    return dict(part(state, ()))


def _tensors(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yield the tensors in a tree of dicts. Lists are not divided."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _tensors(inner, (*path, str(key)))


def _copy_of(tensor: Tensor, rank: int, size: int) -> tuple[int, int]:
    """Return the number of this rank's copy, and the number of equal copies."""
    if not isinstance(tensor, DTensor):
        return rank, size
    mesh, number, copies = tensor.device_mesh, 0, 1
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    for dimension, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            number = number * mesh.size(dimension) + coordinate[dimension]
            copies *= mesh.size(dimension)
    return number, copies


class PinnedMemory:
    """Host memory as a tensor of bytes; pinned for a GPU, so that copies from it need no wait of the host."""

    def __init__(self, memory: mmap.mmap, device: torch.device | None, unpinned: str) -> None:
        """
        Args:
            device: the GPU, which becomes the current one of this thread; None: not pinned.
            unpinned: what happens if the memory cannot be pinned, for the warning.
        """
        memory.madvise(mmap.MADV_DONTFORK)  # a fork would make the GPU write to pages of the child
        self.map = memory
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        # the first touch of memory costs more than many copies into it; in CUDA's call it would block all that
        # training submits to the device
        self.bytes[:: mmap.PAGESIZE].add_(0)
        self._device: torch.device | None = None
        """The GPU that it is pinned for."""
        if device is None:
            return
        torch.cuda.set_device(device)
        code = int(torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), len(memory), 0))
        if not code:
            self._device = device
            return
        # CUDA keeps the error until this thread asks for its last one, as torch does after a kernel: after this one
        with contextlib.suppress(RuntimeError):
            torch.empty(1, device=device).fill_(0)
        log.warning(
            "warning: %.0f MB of memory cannot be pinned (CUDA error %d): %s", len(memory) / 1e6, code, unpinned
        )

    def unpin(self) -> None:
        """Unpin the memory. Call it before the memory is unmapped, because other memory may get its address."""
        if self._device is not None:
            torch.cuda.set_device(self._device)  # a new thread would open the first one
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())
            self._device = None


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where in the memory a tensor lies."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype


class Staging:
    """Host memory into which a rank's part of a state is copied, reused from one checkpoint to the next."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self._rank, self._size = rank, size
        self._places: list[_Place] = []
        """Places of the tensors, in the order in which they are found."""
        self._memory: PinnedMemory | None = None
        self._device: torch.device | None = None
        """The GPU that the state lies on."""

    @property
    def bytes(self) -> int:
        """Bytes of host memory that are held."""
        return len(self._memory.map) if self._memory is not None else 0

    def reserve(self, state: dict[str, Any]) -> None:
        """Allocate and touch the memory that a copy of this state needs."""
        self._allocate(own_part(state, self._rank, self._size))

    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of this rank's part of the state, which training cannot change. It is valid until the next
        call."""
        mine = own_part(state, self._rank, self._size)
        self._allocate(mine)
        copied = mapped(mine, functools.partial(self._copied, iter(self._places)))
        if self._device is not None:
            torch.cuda.current_stream(self._device).synchronize()
        return dict(copied)

    def close(self) -> None:
        """Free the memory. No copy may be in use."""
        self._release()
        self._places = []

    def _allocate(self, state: dict[str, Any]) -> None:
        """Give every tensor a place, unless all have theirs."""
        places: list[_Place] = []
        end = 0
        for tensor in _leaves(state):
            if tensor.device.type == "cuda":
                self._device = tensor.device
            places.append(_Place(end, tensor.shape, tensor.dtype))
            end += -(-tensor.nbytes // _ALIGN) * _ALIGN
        if places == self._places:
            return
        self._release()
        self._places = places
        memory = mmap.mmap(-1, max(end, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory = PinnedMemory(memory, self._device, "checkpoints make training wait longer")

    def _release(self) -> None:
        if self._memory is not None:
            self._memory.unpin()
        self._memory = None  # freed with the last tensor that lies in it

    def _copied(self, places: Iterator[_Place], value: Any) -> Any:
        if isinstance(value, DTensor):
            # not by from_local, which would bring the copy back to the device
            return DTensor(self._copied(places, value.to_local()), value._spec, requires_grad=False)
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        return self._tensor(next(places)).copy_(value.detach(), non_blocking=True)

    def _tensor(self, place: _Place) -> Tensor:
        """The tensor in a place, with a storage of just its size: DCP would copy it once more otherwise."""
        count = math.prod(place.shape)
        if not count:
            return torch.empty(place.shape, dtype=place.dtype)
        assert self._memory is not None
        return torch.frombuffer(self._memory.map, dtype=place.dtype, count=count, offset=place.offset).view(place.shape)


def _leaves(value: Any) -> Iterator[Tensor]:
    """This rank's tensors in a tree of dicts, lists and tuples."""
    if isinstance(value, (dict, list, tuple)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _leaves(inner)
    elif isinstance(value, Tensor):
        yield local(value)

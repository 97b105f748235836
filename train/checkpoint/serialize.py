"""Serializes the training state into a pickled part, with a reference for each tensor, and the tensors, and reads it
back. It is used for snapshots (snapshot.py), and to send rank 0's state to ranks without a folder or memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pickle
from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from train.checkpoint.buffers import Buffers, begin_of_tensors
from train.checkpoint.state_dict import TrainState
from train.data.to_device import mapped
from train.parallel.torch_private import copy_metadata
from train.parallel.world import World

_ALIGN = 64
_PIECE = 64 << 20
"""Maximum bytes that one broadcast sends."""


@dataclasses.dataclass(frozen=True)
class TensorRef:
    """Stands for a tensor in the pickled part."""

    at: int
    """Offset in bytes from the first tensor."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class ShardRef:
    """Stands for a DTensor: this rank's shard, and the layout of the whole."""

    local: TensorRef
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]


@dataclasses.dataclass
class Serialized:
    """A state that is ready to be copied into a buffer. A tensor that several names share is in it once."""

    tensors: list[Tensor] = dataclasses.field(default_factory=list)
    starts: list[int] = dataclasses.field(default_factory=list)
    """The offset of each tensor, in bytes."""
    end: int = 0
    plain: bytes = b""
    """Everything except the tensors."""
    _refs: dict[int, TensorRef] = dataclasses.field(default_factory=dict)
    _shards: dict[int, ShardRef] = dataclasses.field(default_factory=dict)

    def add(self, value: Any) -> Any:
        """Return the value with references instead of tensors."""
        if isinstance(value, DTensor):
            if id(value) not in self._shards:  # each to_local() is another tensor
                local = self.add(value.to_local())
                self._shards[id(value)] = ShardRef(local, value.placements, value.shape, value.stride())
            return self._shards[id(value)]
        if not isinstance(value, Tensor):
            return value
        ref = self._refs.get(id(value))
        if ref is None:
            dense = value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)
            stride = value.stride() if dense else torch.empty(value.shape, device="meta").stride()
            ref = self._refs[id(value)] = TensorRef(self.end, value.dtype, tuple(value.shape), tuple(stride))
            self.tensors.append(value)
            self.starts.append(self.end)
            self.end += -(-ref.size // _ALIGN) * _ALIGN
        return ref

    @property
    def size(self) -> int:
        """Bytes of a buffer that can hold the state."""
        return begin_of_tensors(len(self.plain)) + self.end

    def copy_to(self, memory: Tensor) -> None:
        """Copy the tensors into a buffer (uint8). A GPU copies in its stream, and the host does not wait."""
        start = begin_of_tensors(len(self.plain))
        for tensor, at in zip(self.tensors, self.starts, strict=True):
            if tensor.numel():
                flat = _bytes_of(tensor)
                memory[start + at : start + at + len(flat)].copy_(flat, non_blocking=True)


def _bytes_of(value: Tensor) -> Tensor:
    """Return the bytes of a tensor (uint8) on its device, as a view if possible."""
    value = value.detach()
    if value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last):
        value = value.permute(0, 2, 3, 1)
    return value.contiguous().reshape(-1).view(torch.uint8)


def serialize(state: TrainState, fingerprint: str, step: int, mark: str) -> Serialized:
    """Serialize the state of a run.

    Args:
        fingerprint: of everything that must be the same where the snapshot is used.
        step: the state is that after this step.
        mark: the mark of the attempt that made the step.
    """
    serialized, weights = Serialized(), dict(state.module.state_dict(keep_vars=True))
    tree = {"model": weights, "optimizer": state.optimizer.state_dict(), "scaler": state.precision.scaling()}
    found = mapped(tree | {"extra": state.extra.state()}, serialized.add)
    serialized.plain = pickle.dumps({"fingerprint": fingerprint, "step": step, "mark": mark, "state": found})
    return serialized


@dataclasses.dataclass(frozen=True)
class Content:
    """A snapshot that has been read and verified."""

    step: int
    mark: str
    state: dict[str, Any]
    """`model`, `optimizer`, `scaler`, `extra`."""
    memory: Any
    """The bytes of the tensors: a mapped buffer, or an array."""
    start: int
    """The offset of the tensors in `memory`."""

    def tensor(self, ref: TensorRef) -> Tensor:
        """Return a tensor with its own memory."""
        flat = torch.empty(0, dtype=ref.dtype)
        if ref.size:
            flat = torch.frombuffer(
                self.memory, dtype=ref.dtype, count=ref.size // ref.dtype.itemsize, offset=self.start + ref.at
            )
        found = torch.empty_strided(ref.shape, ref.stride, dtype=ref.dtype)
        return found.copy_(flat.as_strided(ref.shape, ref.stride)) if ref.size else found

    def walk(self, value: Any, mesh: DeviceMesh | None = None) -> Any:
        """Return the value with tensors instead of references.

        Args:
            mesh: of the ranks, if each has a part of the state.
        """

        def held(one: Any) -> Any:
            if isinstance(one, ShardRef):
                assert mesh is not None
                mine = self.tensor(one.local).to(mesh.device_type)
                return DTensor.from_local(
                    mine, mesh, one.placements, run_check=False, shape=one.shape, stride=one.stride
                )
            return self.tensor(one) if isinstance(one, TensorRef) else one

        return mapped(value, held)


def read(buffers: Buffers, slot: int, fingerprint: str) -> Content | None:
    """Read the snapshot in a buffer; None if it is damaged or has another fingerprint."""
    with contextlib.suppress(OSError, pickle.UnpicklingError, KeyError, ValueError, EOFError, AttributeError):
        found = buffers.read(slot)
        if found is not None:
            plain, memory = found
            held = pickle.loads(plain)
            if held["fingerprint"] == fingerprint:
                return Content(held["step"], held["mark"], held["state"], memory, begin_of_tensors(len(plain)))
    return None


def apply(content: Content, state: TrainState) -> None:
    """Load a snapshot into a model, its fresh optimizer and the rest of the state."""
    module, scaler = state.module, state.precision.scaler
    mesh = next((one.device_mesh for one in module.parameters() if isinstance(one, DTensor)), None)
    weights = OrderedDict(content.walk(content.state["model"], mesh))
    copy_metadata(weights, module)
    module.load_state_dict(weights)
    state.optimizer.load_state_dict(content.walk(content.state["optimizer"], mesh))
    state.extra.load(content.walk(content.state["extra"], mesh), state.precision.device)
    if scaler is not None and content.state["scaler"]:
        scaling = content.walk(content.state["scaler"])
        scaler.load_state_dict({key: _number(value) for key, value in scaling.items()})


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def broadcast_state(world: World, state: TrainState) -> None:
    """Send rank 0's state to every rank, with the same bits. A collective.

    Needs host memory for one more copy of the state on each rank.
    """
    own = serialize(state, "", 0, "") if world.is_first else None
    plain, end = world.broadcast((own.plain, own.end) if own is not None else None)
    start = begin_of_tensors(len(plain))
    memory = torch.empty(start + end, dtype=torch.uint8)
    if own is not None:
        own.copy_to(memory)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
    for piece in memory[start:].split(_PIECE) if end else ():
        dist.broadcast(piece, src=0, group=world.group)
    if own is None:
        apply(Content(0, "", pickle.loads(plain)["state"], memory.numpy(), start), state)

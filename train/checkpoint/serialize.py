"""Turns the training state into a plain part and tensors, one after the other, and back.

The plain part is what pickle makes of the state with a `TensorRef` for each tensor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import pickle
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from train.checkpoint.buffers import Buffers, begin_of_tensors
from train.parallel.precision import Precision

_ALIGN = 64


@dataclasses.dataclass(frozen=True)
class TensorRef:
    """Stands for a tensor in the plain part."""

    at: int
    """Its offset in bytes from the first tensor."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def size(self) -> int:
        count = 1
        for length in self.shape:
            count *= length
        return count * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class ShardRef:
    """Stands for a DTensor: the part that this rank has of it, and the whole."""

    place: TensorRef
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]


@dataclasses.dataclass
class Serialized:
    """A state that is ready to be copied into a buffer: each tensor once, however often it is named."""

    tensors: list[Tensor] = dataclasses.field(default_factory=list)
    starts: list[int] = dataclasses.field(default_factory=list)
    """The offset of each, in bytes."""
    end: int = 0
    plain: bytes = b""
    """All but the tensors."""
    _refs: dict[int, TensorRef] = dataclasses.field(default_factory=dict)
    _shards: dict[int, ShardRef] = dataclasses.field(default_factory=dict)

    def walk(self, value: Any) -> Any:
        """The value with places instead of tensors."""
        if isinstance(value, dict):
            return {key: self.walk(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)([self.walk(inner) for inner in value])
        if isinstance(value, DTensor):
            if id(value) not in self._shards:  # each to_local() is another tensor
                place = self.walk(value.to_local())
                self._shards[id(value)] = ShardRef(place, value.placements, value.shape, value.stride())
            return self._shards[id(value)]
        if not isinstance(value, Tensor):
            return value
        place = self._refs.get(id(value))
        if place is None:
            dense = value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)
            stride = value.stride() if dense else torch.empty(value.shape, device="meta").stride()
            place = self._refs[id(value)] = TensorRef(self.end, value.dtype, tuple(value.shape), tuple(stride))
            self.tensors.append(value)
            self.starts.append(self.end)
            self.end += -(-place.size // _ALIGN) * _ALIGN
        return place

    @property
    def size(self) -> int:
        """Bytes of a buffer that it goes into."""
        return begin_of_tensors(len(self.plain)) + self.end

    def copy_to(self, memory: Tensor) -> None:
        """Copy the tensors into a buffer (uint8); a GPU does it when it comes to it, and the host goes on."""
        start = begin_of_tensors(len(self.plain))
        for tensor, at in zip(self.tensors, self.starts, strict=True):
            if tensor.numel():
                flat = _bytes_of(tensor)
                memory[start + at : start + at + len(flat)].copy_(flat, non_blocking=True)


def _bytes_of(value: Tensor) -> Tensor:
    """The bytes of a tensor (uint8), on its device: a view, wherever one can be."""
    value = value.detach()
    if value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last):
        value = value.permute(0, 2, 3, 1)
    return value.contiguous().reshape(-1).view(torch.uint8)


def serialize(
    model: nn.Module, optimizer: torch.optim.Optimizer, precision: Precision, fingerprint: str, step: int, mark: str
) -> Serialized:
    """The state of a model, its optimizer and its loss scaling.

    Args:
        fingerprint: of all that must be the same where the copy is used.
        step: after which the state is this.
        mark: of the attempt that made the step.
    """
    serialized, weights = Serialized(), dict(model.state_dict(keep_vars=True))
    state = serialized.walk({"model": weights, "optimizer": optimizer.state_dict(), "scaler": precision.scaling()})
    serialized.plain = pickle.dumps({"fingerprint": fingerprint, "step": step, "mark": mark, "state": state})
    return serialized


@dataclasses.dataclass(frozen=True)
class Content:
    """A copy that has been read and verified."""

    step: int
    mark: str
    state: dict[str, Any]
    """`model`, `optimizer`, `scaler`."""
    memory: mmap.mmap
    start: int
    """The offset of the tensors in it."""

    def tensor(self, place: TensorRef) -> Tensor:
        """A tensor that owns its memory."""
        flat = torch.empty(0, dtype=place.dtype)
        if place.size:
            flat = torch.frombuffer(
                self.memory, dtype=place.dtype, count=place.size // place.dtype.itemsize, offset=self.start + place.at
            )
        found = torch.empty_strided(place.shape, place.stride, dtype=place.dtype)
        return found.copy_(flat.as_strided(place.shape, place.stride)) if place.size else found

    def walk(self, value: Any, mesh: DeviceMesh | None = None) -> Any:
        """The value with tensors instead of places.

        Args:
            mesh: of the ranks that share the state, where each has a part of it.
        """
        if isinstance(value, dict):
            return {key: self.walk(inner, mesh) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)([self.walk(inner, mesh) for inner in value])
        if isinstance(value, ShardRef):
            assert mesh is not None
            mine = self.tensor(value.place).to(mesh.device_type)
            return DTensor.from_local(
                mine, mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride
            )
        return self.tensor(value) if isinstance(value, TensorRef) else value


def read(buffers: Buffers, slot: int, fingerprint: str) -> Content | None:
    """The copy in a buffer; None if it is damaged, or of a state with another fingerprint."""
    with contextlib.suppress(OSError, pickle.UnpicklingError, KeyError, ValueError, EOFError, AttributeError):
        found = buffers.read(slot)
        if found is not None:
            plain, memory = found
            told = pickle.loads(plain)
            if told["fingerprint"] == fingerprint:
                return Content(told["step"], told["mark"], told["state"], memory, begin_of_tensors(len(plain)))
    return None


def apply(content: Content, module: nn.Module, optimizer: torch.optim.Optimizer, precision: Precision) -> None:
    """Load a copy into a model and its fresh optimizer."""
    mesh = next((one.device_mesh for one in module.parameters() if isinstance(one, DTensor)), None)
    state = OrderedDict(content.walk(content.state["model"], mesh))
    state._metadata = getattr(module.state_dict(), "_metadata", {})  # type: ignore[attr-defined]
    module.load_state_dict(state)
    optimizer.load_state_dict(content.walk(content.state["optimizer"], mesh))
    if precision.scaler is not None and content.state["scaler"]:
        scaling = content.walk(content.state["scaler"])
        precision.scaler.load_state_dict({key: _number(value) for key, value in scaling.items()})


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value

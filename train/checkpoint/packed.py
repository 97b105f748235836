"""A state as bytes and back: what is in it in a few plain words, and the tensors, one after the other."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import mmap
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from train.checkpoint.shared import Piece, Slots, begin_of_tensors
from train.parallel.precision import Precision
from train.record.metrics import Training

_ALIGN = 64


@dataclasses.dataclass(frozen=True)
class Place:
    """A tensor, in the plain part."""

    at: int
    """Bytes after where the tensors begin."""
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
class Part:
    """A tensor that is spread over ranks: this one's part of it, and what it is a part of."""

    place: Place
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]


@dataclasses.dataclass
class Packed:
    """Tensors on their way into a buffer, each once, however often it is named."""

    tensors: list[Tensor] = dataclasses.field(default_factory=list)
    starts: list[int] = dataclasses.field(default_factory=list)
    """Where each begins, in bytes."""
    end: int = 0
    said: bytes = b""
    """All but the tensors, as it was when they were found."""
    _places: dict[int, Place] = dataclasses.field(default_factory=dict)
    _parts: dict[int, Part] = dataclasses.field(default_factory=dict)

    def walk(self, value: Any) -> Any:
        """The value with places instead of tensors."""
        if isinstance(value, dict):
            return {key: self.walk(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)([self.walk(inner) for inner in value])
        if isinstance(value, DTensor):
            if id(value) not in self._parts:  # each to_local() is another tensor
                place = self.walk(value.to_local())
                self._parts[id(value)] = Part(place, value.placements, value.shape, value.stride())
            return self._parts[id(value)]
        if not isinstance(value, Tensor):
            return value
        place = self._places.get(id(value))
        if place is None:
            dense = value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)
            stride = value.stride() if dense else torch.empty(value.shape, device="meta").stride()
            place = self._places[id(value)] = Place(self.end, value.dtype, tuple(value.shape), tuple(stride))
            self.tensors.append(value)
            self.starts.append(self.end)
            self.end += -(-place.size // _ALIGN) * _ALIGN
        return place

    def plain(self, lines: list[Training]) -> bytes:
        """The plain part for `Slots.write`: where the tensors are, and what else there is to say. Zeros may follow."""
        return self.said + pickle.dumps(lines)

    def pieces(self) -> Iterator[Piece]:
        """The bytes of the tensors, each filled up to a multiple of _ALIGN."""
        for value in self.tensors:
            if not value.numel():
                continue
            piece = as_it_lies(value).cpu().numpy().data
            yield piece
            if len(piece) % _ALIGN:
                yield bytes(_ALIGN - len(piece) % _ALIGN)


def as_it_lies(value: Tensor) -> Tensor:
    """The bytes of a tensor as a snapshot has them (uint8, of its size), where it is: a view, wherever one can be."""
    value = value.detach()
    if value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last):
        value = value.permute(0, 2, 3, 1)
    return value.contiguous().reshape(-1).view(torch.uint8)


def pack(model: dict[str, Tensor], optimizer: torch.optim.Optimizer, precision: Precision, **said: Any) -> Packed:
    """A state for `Slots.write`.

    Args:
        said: what else there is to say: `fingerprint`, `step` and `mark`, as `Content` has them.
    """
    packed = Packed()
    state = packed.walk({"model": dict(model), "optimizer": optimizer.state_dict(), "scaler": precision.scaling()})
    packed.said = pickle.dumps(said | {"state": state})
    return packed


@dataclasses.dataclass(frozen=True)
class Content:
    """A snapshot that has been read and verified."""

    step: int
    state: dict[str, Any]
    """`model`, `optimizer`, `scaler`."""
    lines: list[Training]
    """Training lines that may not have been written when rank 0 died."""
    memory: mmap.mmap
    start: int
    mark: str = ""
    """Of the attempt that left it."""

    def tensor(self, place: Place) -> Tensor:
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
            mesh: of the ranks that a state is spread over, if it is.
        """
        if isinstance(value, dict):
            return {key: self.walk(inner, mesh) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)([self.walk(inner, mesh) for inner in value])
        if isinstance(value, Part):
            assert mesh is not None
            mine = self.tensor(value.place).to(mesh.device_type)
            return DTensor.from_local(
                mine, mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride
            )
        return self.tensor(value) if isinstance(value, Place) else value


def read(slots: Slots, slot: int, fingerprint: str) -> Content | None:
    """What a buffer holds; None if it is damaged, or of another run's state."""
    with contextlib.suppress(OSError, pickle.UnpicklingError, KeyError, ValueError, EOFError, AttributeError):
        found = slots.read(slot)
        if found is not None:
            text = io.BytesIO(found[0])
            said, lines = pickle.load(text), pickle.load(text)
            if said["fingerprint"] == fingerprint:
                start = begin_of_tensors(len(found[0]))
                return Content(said["step"], said["state"], lines, found[1], start, said["mark"])
    return None


def apply(content: Content, module: nn.Module, optimizer: torch.optim.Optimizer, precision: Precision) -> None:
    """Put a snapshot into a model and its fresh optimizer."""
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

"""Serializes the training state into a pickled part, with a reference for each tensor, and the tensors, and reads it
back. It is used for snapshots (snapshot.py), and to send rank 0's state to ranks without a folder or memory.

The tensors lie one after the other. Ranks that hold the same state share the copying of it: each copies an equal part
of the bytes, and the first one the pickled part.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pickle
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..data.to_device import mapped
from ..parallel.torch_private import copy_metadata
from ..parallel.world import World
from .buffers import Buffers, begin_of_tensors
from .state_dict import TrainState

_ALIGN = 64


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

    part: int = 0
    parts: int = 1
    """The part of the bytes to copy, and the number of parts."""
    tensors: list[Tensor] = dataclasses.field(default_factory=list)
    starts: list[int] = dataclasses.field(default_factory=list)
    """The offset of each tensor, in bytes."""
    rest_until_update: list[bool] = dataclasses.field(default_factory=list)
    """Whether forwards leave the tensor alone: only updates change weights, their averages and an optimizer's state."""
    end: int = 0
    plain: bytes = b""
    """Everything except the tensors."""
    _refs: dict[int, TensorRef] = dataclasses.field(default_factory=dict)
    _shards: dict[int, ShardRef] = dataclasses.field(default_factory=dict)

    def add(self, value: Any, rests: bool = False) -> Any:
        """Return the value with references instead of tensors."""
        if isinstance(value, DTensor):
            if id(value) not in self._shards:  # each to_local() is another tensor
                local = self.add(value.to_local(), rests or isinstance(value, nn.Parameter))
                self._shards[id(value)] = ShardRef(local, value.placements, value.shape, value.stride())
            return self._shards[id(value)]
        if not isinstance(value, Tensor):
            return value
        ref = self._refs.get(id(value))
        if ref is None:
            stride = value.stride() if _is_dense(value) else torch.empty(value.shape, device="meta").stride()
            ref = self._refs[id(value)] = TensorRef(self.end, value.dtype, tuple(value.shape), tuple(stride))
            self.tensors.append(value)
            self.starts.append(self.end)
            self.rest_until_update.append(rests or isinstance(value, nn.Parameter))
            self.end += -(-ref.size // _ALIGN) * _ALIGN
        return ref

    def add_at_rest(self, value: Any) -> Any:
        """Return the value with references instead of tensors, which forwards leave alone."""
        return self.add(value, rests=True)

    @property
    def first(self) -> int:
        """The first byte of the tensors to copy."""
        return begin_of_part(self.end, self.part, self.parts)

    @property
    def length(self) -> int:
        """Bytes of the tensors to copy."""
        return begin_of_part(self.end, self.part + 1, self.parts) - self.first

    @property
    def size(self) -> int:
        """Bytes of a buffer that can hold the part to copy."""
        return begin_of_tensors(len(self.plain)) + self.length

    def copy_to(self, memory: Tensor, rests_until_update: bool | None = None) -> None:
        """Copy the tensors into a buffer (uint8). A GPU copies in its stream, and the host does not wait.

        Args:
            rests_until_update: which tensors to copy; None: all.
        """
        start, first, last = begin_of_tensors(len(self.plain)), self.first, self.first + self.length
        for tensor, at, rests in zip(self.tensors, self.starts, self.rest_until_update, strict=True):
            low, high = max(at, first), min(at + tensor.nbytes, last)
            if low < high and rests_until_update in (None, rests):
                own = memory[start + low - first : start + high - first]
                own.copy_(bytes_of(tensor)[low - at : high - at], non_blocking=True)


def begin_of_part(size: int, part: int, parts: int) -> int:
    """Return the first byte of a part, if these bytes are divided into equal parts."""
    return min(-(-size // (parts * _ALIGN)) * part * _ALIGN, size)


def _is_dense(value: Tensor) -> bool:
    """Whether the elements of a tensor lie in memory without gaps, each once, in whatever order of dimensions."""
    if value.is_contiguous():
        return True
    end = 1
    for stride, count in sorted(zip(value.stride(), value.shape, strict=True)):
        if count != 1 and stride != end:
            return False
        end *= count
    return True


def bytes_of(value: Tensor) -> Tensor:
    """Return the bytes of a tensor (uint8) on its device, as a view if possible."""
    value = value.detach()
    flat = value.as_strided((value.numel(),), (1,)) if _is_dense(value) else value.reshape(-1)
    return flat.view(torch.uint8)


class Source(Protocol):
    """A state that can be serialized."""

    def take_apart(self, into: Serialized) -> dict[str, Any]:
        """Return the state with references instead of tensors, after the tensors were added to `into`."""


def serialize(
    state: Source, fingerprint: str, step: int, mark: str, part: int = 0, parts: int = 1
) -> Serialized:  # fmt: skip
    """Serialize the state of a run.

    Args:
        fingerprint: of everything that must be the same where the snapshot is used.
        step: the state is that after this step.
        mark: the mark of the attempt that made the step.
        part: the part that this rank copies; ranks that hold the same state copy `parts` parts of it.
    """
    serialized = Serialized(part, parts)
    found = state.take_apart(serialized)
    if parts > 1:
        mark += f" {zlib.crc32(repr(serialized.starts).encode())}"  # the places of tensors must be the same
    held = {"fingerprint": fingerprint, "mark": mark}
    serialized.plain = pickle.dumps(held | {"state": found} if part == 0 else held)
    return serialized


@dataclasses.dataclass(frozen=True)
class Content:
    """A snapshot that has been verified."""

    step: int
    state: dict[str, Any]
    """What `Source.take_apart` returned."""
    parts: Sequence[memoryview]
    """The bytes of the tensors (memoryviews): one part after the other."""

    def tensor(self, ref: TensorRef) -> Tensor:
        """Return a tensor with its own memory."""
        flat, first = torch.empty(ref.size, dtype=torch.uint8), 0
        for part in self.parts:
            low, high = max(ref.at, first), min(ref.at + ref.size, first + len(part))
            if low < high:
                piece = part[low - first : high - first]
                flat[low - ref.at : high - ref.at] = torch.frombuffer(piece, dtype=torch.uint8)
            first += len(part)
        return flat.view(ref.dtype).as_strided(ref.shape, ref.stride)

    def shard(self, ref: ShardRef, mesh: DeviceMesh) -> DTensor:
        """Return a tensor of which this rank has a part."""
        mine = self.tensor(ref.local).to(mesh.device_type)
        return DTensor.from_local(mine, mesh, ref.placements, run_check=False, shape=ref.shape, stride=ref.stride)

    def walk(self, value: Any, mesh: DeviceMesh | None = None) -> Any:
        """Return the value with tensors instead of references.

        Args:
            mesh: of the ranks, if each has a part of the state.
        """

        def held(ref: Any) -> Any:
            if isinstance(ref, ShardRef):
                assert mesh is not None
                return self.shard(ref, mesh)
            return self.tensor(ref) if isinstance(ref, TensorRef) else ref

        return mapped(value, held)


def mark_of(part: Buffers, step: int, fingerprint: str) -> str | None:
    """Verify a part of the snapshot of a step. Returns its mark, which must be that of all parts; None: it is damaged
    or has another fingerprint."""
    with contextlib.suppress(OSError, pickle.UnpicklingError, KeyError, ValueError, EOFError, AttributeError):
        slot = part.steps[step]
        held = pickle.loads(part.read(slot)[0]) if part.is_whole(slot) else {"fingerprint": None}
        if held["fingerprint"] == fingerprint:
            return str(held["mark"])
    return None


def read(parts: Sequence[Buffers], step: int) -> Content:
    """Return the snapshot of a step, from all its parts, which have been verified."""
    read = [part.read(part.steps[step]) for part in parts]
    return Content(step, pickle.loads(read[0][0])["state"], [tensors for _, tensors in read])


def apply(content: Content, state: TrainState) -> None:
    """Load a snapshot into a model, its fresh optimizer and the rest of the state."""
    mesh = next((p.device_mesh for p in state.module.parameters() if isinstance(p, DTensor)), None)
    _load(content.state, lambda part: content.walk(part, mesh), state)


def _load(held: dict[str, Any], walk: Callable[[Any], Any], state: TrainState) -> None:
    """Load a serialized state.

    Args:
        walk: returns a part of it with tensors instead of references.
    """
    module, scaler = state.module, state.precision.scaler
    weights = OrderedDict(walk(held["model"]))
    copy_metadata(weights, module)
    module.load_state_dict(weights)
    state.optimizer.load_state_dict(walk(held["optimizer"]))
    state.extra.load(walk(held["extra"]), state.precision.device)
    if scaler is not None and held["scaler"]:
        scaler.load_state_dict({key: _number(value) for key, value in walk(held["scaler"]).items()})


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def broadcast_state(world: World, state: TrainState) -> None:
    """Send rank 0's state to every rank, with the same bits. A collective.

    Each tensor is received where it stays, on its device. So no rank needs memory for a second copy of the state.
    """
    own = serialize(state, "", 0, "") if world.is_first else None
    sent = (
        [(at, one) for at, one in zip(own.starts, own.tensors, strict=True) if one.numel()] if own is not None else []
    )
    kinds: dict[int, str]
    plain, kinds = world.broadcast((own.plain, {at: one.device.type for at, one in sent}) if own is not None else None)
    held, places = pickle.loads(plain)["state"], dict(sent)
    if own is None:
        _find_places(held["model"], state.module.state_dict(keep_vars=True), places)
        _find_places(held["extra"], state.extra.state(), places)

    def tensor_for(ref: Any) -> Any:
        if not isinstance(ref, TensorRef):
            return ref
        if ref.size and ref.at in places:
            return places[ref.at]
        device = world.device if kinds.get(ref.at) == world.device.type else torch.device("cpu")
        made = torch.empty_strided(ref.shape, ref.stride, dtype=ref.dtype, device=device)
        return places.setdefault(ref.at, made) if ref.size else made

    tree = held if own is not None else mapped(held, tensor_for)
    for at in kinds:
        tensor = places[at]
        flat = bytes_of(tensor)
        dist.broadcast(flat, src=0, group=world.group)
        if own is None and flat.data_ptr() != tensor.data_ptr():  # its memory is laid out otherwise
            tensor.detach().copy_(flat.view(tensor.dtype).view(tensor.shape))
    if own is None:
        _load(tree, lambda part: part, state)


def _find_places(theirs: Any, mine: Any, places: dict[int, Tensor]) -> None:
    """Add this rank's tensors in `mine`, by the offset of the reference that stands for them in rank 0's state."""
    if isinstance(theirs, TensorRef):
        if not theirs.size or not isinstance(mine, Tensor):
            return
        stride = mine.stride() if _is_dense(mine) else theirs.stride
        if (mine.shape, mine.dtype, stride) == (theirs.shape, theirs.dtype, theirs.stride):
            places.setdefault(theirs.at, mine)
    elif isinstance(theirs, Mapping) and isinstance(mine, Mapping):
        for key in theirs.keys() & mine.keys():
            _find_places(theirs[key], mine[key], places)

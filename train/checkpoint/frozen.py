"""Frozen weights, written once into the run folder. Checkpoints leave out what is equal there, byte for byte.

`frozen-SHA.safetensors` holds the weights that were frozen when the model was built, as they were at the first save. A
manifest refers to the file by its hash. Each save compares SHA-256 digests of the tensors that it is about to write,
in the thread that writes. What was moved all the same is written as usual from then on. So file and shards together
are the state, whatever a task does to frozen weights. What is in the file matters only for how much is left out.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from .. import faults
from ..parallel.world import World
from ..run import durable
from ..run.run_folder import Run
from .extra import AVERAGES
from .manifest import FROZEN_PARTIAL, MANIFEST, frozen_files, frozen_name, read_manifest
from .writer import DurableFile

_CODES = {
    torch.float64: "F64", torch.int64: "I64", torch.float32: "F32", torch.int32: "I32", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""Names of types in a .safetensors file. Tensors of other types are written into each checkpoint."""
FROZEN_KEYS = frozenset({"model", AVERAGES})
"""Parts of a state whose tensors are compared. The average of a frozen weight is that weight."""
_PIECE = 1 << 22
"""Bytes that are read or written at once."""
_HEADER = 100_000_000
"""Maximum bytes of a header that safetensors reads."""
Digests = dict[str, str]
"""Maps the name of a tensor in a file to a digest of its type, shape and bytes."""
Entry = dict[str, Any]
"""Size and SHA-256 of a file, as a manifest lists them."""


class Frozen:
    """Leaves frozen weights out of what the ranks of a run write. `leave_out` is a collective."""

    def __init__(self, run: Run, names: Iterable[str], world: World) -> None:
        """
        Args:
            names: the weights that are frozen, by their names in the model's state.
            world: the ranks that save, with a group for the thread that writes.
        """
        self._run, self._names, self._world = run, frozenset(names), world
        self._entry: Entry = {}
        self._digests: Digests = {}
        """Of the tensors in the run's file; {}: no file is known yet."""
        self._moved: set[tuple[str, str]] = set()
        """Tensors of this rank, by their keys in the state, that differed in a save."""

    def live(self, state: dict[str, Any]) -> dict[str, Tensor]:
        """Return the frozen weights in a state, for `leave_out`. Reading them later is safe: what changes meanwhile
        differs from the file, and is written."""
        weights = state.get("model", {})
        return {name: weights[name] for name in sorted(self._names & weights.keys()) if weights[name].dtype in _CODES}

    def leave_out(
        self, state: dict[str, Any], live: dict[str, Tensor], check_room: Callable[[Path, int], None]
    ) -> tuple[dict[str, Any], Entry, int]:
        """Return this rank's part of a state without what the run's file holds, the file's entry for the manifest ({}:
        nothing is left out), and the bytes that all ranks leave out. A collective.

        Args:
            live: the frozen weights on rank 0, from which the file is written if there is none.
            check_room: raises OSError if the disk of a folder has no room for this many bytes.
        """
        if not self._names:
            return state, {}, 0
        known = self._world.on_first(lambda: self._provide(live, check_room))
        if known is not None:
            self._entry, self._digests = known
        left, made = 0, dict(state)
        for key in FROZEN_KEYS & state.keys():
            own = state[key]
            held = {name for name in own.keys() & self._digests.keys() if self._holds(key, name, own[name])}
            left += sum(own[name].nbytes for name in held)
            made[key] = {name: tensor for name, tensor in own.items() if name not in held}
        total = sum(self._world.gather(left))
        return made, self._entry if total else {}, total

    def _holds(self, key: str, name: str, tensor: Tensor) -> bool:
        if (key, name) not in self._moved and digest_of(tensor) != self._digests[name]:
            self._moved.add((key, name))
        return (key, name) not in self._moved

    def _provide(
        self, live: dict[str, Tensor], check_room: Callable[[Path, int], None]
    ) -> tuple[Entry, Digests] | None:
        """Find the run's file, or write it. Returns its entry and digests; None: they are known."""
        if self._entry:
            with contextlib.suppress(OSError):
                if (self._run.folder / frozen_name(self._entry)).stat().st_size == self._entry["size"]:
                    return None
        for name in frozen_files(self._run):
            with contextlib.suppress(OSError, ValueError):
                entry, digests = inspect(self._run.folder / name)
                if name == frozen_name(entry) and digests.keys() == live.keys():
                    return entry, digests
        if not live:
            return {}, {}
        check_room(self._run.folder, sum(tensor.nbytes for tensor in live.values()))
        entry = write(self._run, live)
        faults.here("save.frozen")
        path = self._run.folder / frozen_name(entry)
        with contextlib.suppress(ValueError):
            found, digests = inspect(path)
            if found == entry:
                return found, digests
        raise OSError(errno.EIO, "the disk gives other bytes than were written", str(path))


def digest_of(tensor: Tensor) -> str:
    """Return a digest of a tensor's type, shape and bytes."""
    digest = _begin(_CODES.get(tensor.dtype, ""), list(tensor.shape))
    if tensor.numel():
        digest.update(_bytes_of(tensor))
    return digest.hexdigest()


def _begin(code: str, shape: list[int]) -> Any:
    return hashlib.sha256(f"{code} {shape}\n".encode())


def _bytes_of(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def write(run: Run, tensors: dict[str, Tensor], wanted: Entry | None = None) -> Entry:
    """Write tensors to a file in the run folder, committed under the name of its hash. Returns its entry.

    Equal tensors make equal files. A tensor on a GPU is copied beside what the device computes.

    Args:
        wanted: the entry that the file must have; another one is not committed.
    """
    # the largest elements first, so that all are aligned
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header, end = {}, 0
    for name in order:
        one = tensors[name]
        places = [end, end := end + one.nbytes]
        header[name] = {"dtype": _CODES[one.dtype], "shape": list(one.shape), "data_offsets": places}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = run.folder / f"{FROZEN_PARTIAL}{os.getpid()}"
    device = next((one.device for one in tensors.values() if one.is_cuda), None)
    try:
        with DurableFile(partial) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                with torch.cuda.stream(torch.cuda.Stream(device)) if device is not None else contextlib.nullcontext():
                    content = _bytes_of(tensors[name])
                for first in range(0, len(content), _PIECE):
                    file.write(content[first : first + _PIECE])
        if wanted in (None, file.entry):
            partial.replace(run.folder / frozen_name(file.entry))
            durable.sync(run.folder)
        return file.entry
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def inspect(path: Path) -> tuple[Entry, Digests]:
    """Read a file. Returns its entry, and the digests of its tensors.

    Raises:
        ValueError: it is damaged.
    """
    whole, digests, size = hashlib.sha256(), Digests(), path.stat().st_size
    with path.open("rb") as file:
        length = file.read(8)
        text = file.read(min(int.from_bytes(length, "little"), _HEADER))
        whole.update(length + text)
        try:
            places = [(one["data_offsets"], name, one["dtype"], one["shape"]) for name, one in json.loads(text).items()]
            for (first, last), name, code, shape in sorted(places):
                own = _begin(code, shape)
                for begin in range(first, last, _PIECE):
                    piece = file.read(min(_PIECE, last - begin))
                    if not piece:
                        raise ValueError(f"{path.name} is too short")
                    own.update(piece)
                    whole.update(piece)
                digests[name] = own.hexdigest()
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path.name} is damaged") from error
        while rest := file.read(_PIECE):
            whole.update(rest)
    return {"size": size, "sha256": whole.hexdigest()}, digests


def held_by(folder: Path) -> dict[str, Tensor]:
    """Return the tensors in the file that a verified checkpoint refers to, on the CPU, read as they are used; {}: the
    checkpoint is whole by itself."""
    entry = read_manifest(folder).get("frozen") if (folder / MANIFEST).exists() else None  # DCP's own have none
    if not entry:
        return {}
    from safetensors.torch import load_file

    return load_file(folder.parent.parent / frozen_name(entry))


def fill(places: dict[str, Tensor], held: dict[str, Tensor]) -> None:
    """Copy tensors of a file to tensors of a model, which may be spread over ranks.

    Raises:
        ValueError: their shapes differ.
    """
    for name, place in places.items():
        value = held[name]
        if value.shape != place.shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)} there and {tuple(place.shape)} in the model")
        if isinstance(place, DTensor):  # each rank takes its own part
            whole = value.to(place.device)
            value = distribute_tensor(whole, place.device_mesh, place.placements, src_data_rank=None)
        with torch.no_grad():
            place.copy_(value)


def make_again(run: Run, weights: dict[str, Tensor], *, frozen: Iterable[str], entry: Entry) -> bool:
    """Write a damaged file again from a run's first weights. Returns whether its hash is that of the file.

    Args:
        weights: of the whole model.
        frozen: the names that are frozen.
    """
    names = set(frozen)
    with contextlib.suppress(OSError, ValueError):
        names = {*inspect(run.folder / frozen_name(entry))[1]} or names
    if not names <= weights.keys():
        names = set(frozen)
    tensors = {name: weights[name] for name in names if weights[name].dtype in _CODES}
    return bool(tensors) and write(run, tensors, entry) == entry

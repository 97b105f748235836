"""Reads a session's checkpoint, each rank what it needs, without executing anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from ..checkpoint.load import SafeReader
from . import by_rank, objects
from .objects import Key, Module, Optimizer, Ref, Registered


class Reading:
    """Reads a checkpoint, each rank what it needs."""

    def __init__(self, folder: Path, rank: int) -> None:
        """
        Args:
            rank: the rank whose own part to read; rank 0's is that of all.
        """
        self._reader = SafeReader(folder)
        self._sizes = self._reader.read_metadata()
        self._paths = {path: key for key, path in (self._sizes.planner_data or {}).items()}
        self._own = by_rank.section_of(rank)
        self._refs: list[Ref] = []
        self.has_own = any(str(path[0]).startswith(by_rank.section_of(0)[:-1]) for path in self._paths)

    def rest(self) -> dict[str, Any]:
        """Return the plain values."""
        path: tuple[Any, ...] = (self._own, "rest") if (self._own, "rest") in self._paths else ("rest",)
        stored: Any = self._sizes.state_dict_metadata[self._paths[path]]
        data = torch.empty(stored.size, dtype=torch.uint8)
        self._read({path: data})
        found = objects.unpacked(data.numpy().tobytes())
        self._refs = [Ref.of_plain(values) for values in found["refs"]]
        return dict(found)

    def state(self, state: Any, one: Registered) -> Any:
        """Return the state of an object with its tensors."""
        places: dict[tuple[Any, ...], Tensor] = {}
        made: dict[int, Tensor] = {}
        for place, number in enumerate(objects.numbers_in(state)):
            ref = self._refs[number]
            made[number] = places[self._path(ref.key)] = ref.empty(one.like(ref, place))
        self._read(places)
        return objects.put_in(state, lambda number: as_it_was(made[number], self._refs[number], one))

    def _path(self, key: Key) -> tuple[Any, ...]:
        own = self._own, ".".join(key)
        return own if own in self._paths else key

    def _read(self, places: dict[tuple[Any, ...], Tensor]) -> None:
        tree: dict[str, Any] = {}
        for path, tensor in places.items():
            if len(path) == 1:
                tree[path[0]] = tensor
            else:
                tree.setdefault(path[0], {})[path[1]] = tensor
        if tree:
            dcp.load(tree, storage_reader=self._reader, no_dist=True)


def as_it_was(tensor: Tensor, ref: Ref, one: Registered) -> Tensor:
    """Return a tensor on the kind of device and of the kind that it was saved from."""
    is_torchs = isinstance(one, (Module, Optimizer))  # they put values where they belong
    if ref.is_on_gpu and not is_torchs and torch.cuda.is_available():
        tensor = tensor.to(torch.device("cuda", torch.cuda.current_device()))
    return nn.Parameter(tensor, ref.requires_grad) if ref.is_parameter else tensor.requires_grad_(ref.requires_grad)

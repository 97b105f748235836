"""Digests of the whole state after each update, for `train prove` (run/proving.py)."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..parallel.strategy import local
from ..run import proving
from ..run.run_folder import Run
from ..signals import USER, StopRequest
from .serialize import bytes_of

_LARGE = 100 << 20
"""Bytes of state above which only ten updates of a run get a digest."""
_FEW = 10
_PLAIN = (str, bytes, bytearray, int, float, complex, np.generic, torch.dtype, torch.Size)
"""Classes whose repr is the same in each process."""
State = Mapping[str, Any]
"""Maps the name of an object to its state: tensors and plain values in dicts and lists."""


class Whole:
    """Stands in for `serialize.Serialized` where a state is taken apart: its tensors stay in their places."""

    def add(self, value: Any, rests: bool = False) -> Any:
        return value

    add_at_rest = add


class Digests:
    """Writes the digests of one rank, and does what else `train prove` asks for."""

    def __init__(self, asked: proving.Asked, run: Run, *, rank: int, attempt: int) -> None:
        self.asked, self._run, self._rank, self._attempt = asked, run, rank, attempt
        self._file = proving.digests_file(run, rank).open("a", buffering=1)
        self._every, self._saved = 0, 0
        self._last = time.monotonic()

    def saves(self, updates: int) -> bool:
        """Whether a checkpoint is to be saved after this many updates. Once for each number, the same on all ranks."""
        is_due = updates in self.asked.saves and updates != self._saved
        self._saved = updates if is_due else self._saved
        return is_due

    def stops(self, updates: int, stop: StopRequest) -> bool:
        """Return whether all ranks stop after this many updates, and then ask this one to."""
        if updates < self.asked.stop:
            return False
        stop.ask(USER, f"as asked, after {updates} updates")
        return True

    def after(self, updates: int, state: Callable[[], State], at: tuple[int, int] = (0, 0)) -> None:
        """Write the digests of the state after this many updates.

        Args:
            state: returns the state.
            at: epoch and batch, where several states have the same number of updates.
        """
        if not self._every:
            size = sum(one.nbytes for _, one in leaves(state()) if isinstance(one, Tensor))
            self._every = max(1, self.asked.stop // _FEW) if size > _LARGE else 1
        if updates % self._every == 0 or updates >= self.asked.stop or updates == self.asked.dump:
            found = state()
            objects = {name: digest_of(one) for name, one in found.items()}
            line = {"attempt": self._attempt, "updates": updates, "epoch": at[0], "batch": at[1], "objects": objects}
            self._file.write(json.dumps(line) + "\n")
            if updates == self.asked.dump:
                kept = {name: {path: _kept(value) for path, value in leaves(one)} for name, one in found.items()}
                torch.save(kept, proving.dump_file(self._run, self._rank))
        left = self._last + self.asked.pace - time.monotonic()
        if left > 0:
            time.sleep(left)
        self._last = time.monotonic()


def leaves(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors and plain values of a state, each with its path, in the order of keys. Of a tensor that is
    spread over ranks, this rank's part."""
    if isinstance(state, Mapping):
        for key, one in sorted(state.items(), key=lambda item: str(item[0])):  # loading may change the order
            yield from leaves(one, f"{path}.{key}" if path else str(key))
    elif isinstance(state, (list, tuple)):
        for number, one in enumerate(state):
            yield from leaves(one, f"{path}.{number}" if path else str(number))
    else:
        yield path, local(state.detach()) if isinstance(state, Tensor) else state


def digest_of(state: Any) -> str:
    """Return the SHA-256 over the paths, types and bytes of a state, as 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for path, value in leaves(state):
        if isinstance(value, Tensor):
            tensor = value.cpu()
            tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
            digest.update(f"{path}\n{tensor.dtype}\n{tuple(tensor.shape)}\n".encode())
            digest.update(bytes_of(tensor.contiguous()).numpy().tobytes())
        else:
            digest.update(f"{path}\n{_plain(value)}\n".encode())
    return digest.hexdigest()[:16]


def _plain(value: Any) -> str:
    """Return a plain value as text that is the same in each process, or else the name of its class."""
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    if isinstance(value, (set, frozenset)):
        return str(sorted(map(_plain, value)))
    return repr(value) if value is None or isinstance(value, _PLAIN) else type(value).__qualname__


def _kept(value: Any) -> Any:
    return value.cpu().clone() if isinstance(value, Tensor) else _plain(value)

"""Host memory that a state is copied to, so that training can go on while it is written."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Stage:
    """Host memory into which a state is copied, reused from one checkpoint to the next."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, ...], Tensor] = {}
        self._lock = threading.Lock()

    def reserve(self, state: dict[str, Any]) -> None:
        """Allocate and touch the memory that a copy of this state needs."""
        with self._lock:
            self._walk(state, (), lambda tensor, buffer: buffer.zero_())

    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """A copy of the state that training cannot change. Valid until the next call."""
        with self._lock:
            copied = self._walk(state, (), lambda tensor, buffer: buffer.copy_(tensor.detach(), non_blocking=True))
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            return dict(copied)

    def _walk(self, value: Any, path: tuple[str, ...], fill: Callable[[Tensor, Tensor], Any]) -> Any:
        if isinstance(value, dict):
            return {key: self._walk(inner, (*path, str(key)), fill) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._walk(inner, (*path, str(place)), fill) for place, inner in enumerate(value))
        if isinstance(value, DTensor):
            # made like this, and not by from_local, which would take the copy back to the device
            return DTensor(self._walk(value.to_local(), path, fill), value._spec, requires_grad=False)
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        buffer = self._buffers.get(path)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            pin = value.device.type == "cuda"
            buffer = self._buffers[path] = torch.empty(value.shape, dtype=value.dtype, pin_memory=pin)
        fill(value, buffer)
        return buffer

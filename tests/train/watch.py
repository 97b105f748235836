"""What operations take of memory, and what ranks send."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Watch(TorchDispatchMode):
    """Notes the memory that operations take, and the types of what ranks send."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[weakref.ref[torch.UntypedStorage]] = []
        self.total = 0
        """Bytes of everything taken, even if it is free by now."""
        self.sent: set[tuple[str, torch.dtype]] = set()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), more: Any = None) -> Any:
        given = {one.untyped_storage() for one in tree_leaves((arguments, more)) if isinstance(one, Tensor)}
        made = function(*arguments, **(more or {}))
        tensors = [one for one in tree_leaves(made) if isinstance(one, Tensor)]
        if function.namespace == "c10d":
            self.sent |= {(function.overloadpacket.__name__, one.dtype) for one in tensors}
        fresh = [one.untyped_storage() for one in tensors if one.untyped_storage() not in given]
        self.taken += map(weakref.ref, fresh)
        self.total += sum(storage.nbytes() for storage in fresh)
        return made

    def alive(self) -> int:
        """Return the bytes that are still taken."""
        found = {id(storage): storage for one in self.taken if (storage := one()) is not None}
        return sum(storage.nbytes() for storage in found.values())

"""Snapshots of a session: copies of its state in memory that outlives its ranks. A rank's death costs the start of the
script and the updates since the last one.

Each rank copies its own state, into memory that the agent owns (checkpoint/buffers.py). All ranks copy after the same
updates, every so many. Rank 0 measures how many keep the cost at a hundredth of the time, and the ranks agree on that
number through the store (agreement.py), now and then. So no step has a collective of its own.

An update needs the gradients of all ranks. So when a rank begins to overwrite its older copy, every other rank has made
the copy before this one, and a copy that all ranks have remains.
"""

from __future__ import annotations

import collections
import copy
import logging
import math
import time
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.buffers import Buffers
from ..checkpoint.serialize import Content, ShardRef
from ..checkpoint.snapshot import SHARE, Copies, Parts
from ..parallel.world import World
from ..supervise import memory
from . import objects
from .objects import Ref, Registered
from .reading import as_it_was

log = logging.getLogger("train")

_MEASURED = 32
"""Maximum number of updates whose time counts for the pace."""
_FEWEST = 4
"""Number of updates that are measured before the first agreement."""
_CHANGES = 1.5
"""Factor by which the number of updates between two copies must be wrong before the ranks agree on another."""
_CALM = 2.0
"""Seconds between two requests for another number."""


class Memory(Copies):
    """One rank's copies."""

    def __init__(self, buffers: Buffers, *, world: World, fingerprint: str, attempt: int, device: torch.device) -> None:
        """
        Args:
            buffers: this rank's own.
            device: of the state.
        """
        seen = copy.copy(world)
        seen.device = device
        super().__init__(
            Parts([buffers]), world=seen, fingerprint=fingerprint, mark=f"{attempt}", memory_left=memory.left
        )
        self._ends = collections.deque[tuple[float, int]](maxlen=_MEASURED)
        """When updates ended: a time and the number of updates."""
        self._asked = -math.inf

    def wish(self, updates: int, every: int) -> int:
        """Return the number of updates between two copies on which rank 0 wants to agree; 0: the present one.

        Args:
            updates: the updates so far, at this border.
            every: the present number; 0: none yet.
        """
        now = time.monotonic()
        if not self._ends or updates > self._ends[-1][1]:
            self._ends.append((now, updates))
        if not self._memory or self._is_over or len(self._ends) <= _FEWEST or now - self._asked < _CALM:
            return 0
        (first, low), (last, high) = self._ends[0], self._ends[-1]
        pace = max((last - first) / (high - low), 1e-6)
        # on a GPU a copy is sealed at the border after it
        wanted = max(2 if self._world.device.type == "cuda" else 1, math.ceil(self.cost / SHARE / pace))
        if every / _CHANGES <= wanted <= every * _CHANGES:
            return 0
        self._asked = now
        return wanted

    def after_border(self, updates: int, is_due: bool) -> None:
        """Copy the state if that is due, seal the copy before, or reserve the memory."""
        if self._is_over:
            return
        if is_due and self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)  # no rank's GPU is more than one update behind then
        self._try_continue(updates, is_due)


class InMemory:
    """Reads a snapshot, as `reading.Reading` reads a checkpoint."""

    has_own = False

    def __init__(self, content: Content) -> None:
        self._content, self._state = content, content.state

    def rest(self) -> dict[str, Any]:
        """Return the plain values."""
        return dict(self._state)

    def state(self, state: Any, one: Registered) -> Any:
        """Return the state of an object with its tensors."""
        made = {number: self._tensor(number, place, one) for place, number in enumerate(objects.numbers_in(state))}
        return objects.put_in(state, made.__getitem__)

    def _tensor(self, number: int, place: int, one: Registered) -> Tensor:
        ref = Ref.of_plain(self._state["refs"][number])
        held = self._state["tensors"][ref.key]
        if isinstance(held, ShardRef):
            tensor: Tensor = self._content.shard(held, one.like(ref, place).device_mesh)
        else:
            tensor = self._content.tensor(held)
        return as_it_was(tensor, ref, one)

"""The order of the samples that a task's own function gives: computed on rank 0, an epoch at a time, and sent to all.

The loop asks before each step, on the main thread of every rank. So sending is never mixed with other collectives,
and the random numbers that the function draws disturb nothing: all others are seeded before they are drawn.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from ..data.fetch import passes
from ..data.plan import Plan
from ..data.sampling import Indices
from ..errors import Refused, TrainingFailed
from ..parallel.world import World
from ..run import heartbeat
from ..run.heartbeat import Heart

_KEPT = 32
"""Number of epochs whose orders a checkpoint keeps digests of: the present one, and those that are fetched ahead."""


def new_digests(device: torch.device) -> Tensor:
    """Return a tensor of the state for the digests: rows of an epoch, counted from 1, and its digest."""
    return torch.zeros((_KEPT, 2), dtype=torch.int64, device=device)


def _digest(indices: Indices) -> int:
    return int.from_bytes(hashlib.blake2b(indices.tobytes(), digest_size=7).digest(), "little")


class Orders:
    """The orders of the epochs that a rank fetches now."""

    def __init__(
        self, compute: Callable[[int], Indices], *, name: str, plan: Plan, world: World, heart: Heart, ahead: int,
        total_steps: int, digests: Tensor | None = None, compares: bool = True,
    ) -> None:  # fmt: skip
        """
        Args:
            compute: returns the indices of an epoch; called on rank 0 alone.
            name: the task's function and its file, for messages.
            plan: has the length of every epoch.
            ahead: maximum number of steps that are fetched before the present one is over.
            digests: of the state, made by `new_digests`. A checkpoint has filled it where an attempt continues.
            compares: whether the orders of these epochs must be the same again.
        """
        self._digests = digests
        self._before = dict(digests.tolist()) if digests is not None and compares else {}
        """Maps an epoch, counted from 1, to the digest of the order that an earlier attempt trained with."""
        self._compute, self._name, self._plan = compute, name, plan
        self._world, self._heart, self._ahead, self._last_step = world, heart, ahead, total_steps - 1
        self._known: dict[int, Indices] = {}
        self._until = 0
        """The first step before which nothing has to be done."""

    def of(self, epoch: int) -> Indices:
        """Return the indices of an epoch that `ready` has made known."""
        return self._known[epoch]

    def ready(self, step: int) -> list[str]:
        """Make known all epochs from which samples may be fetched in this step, counted from 0. A collective.

        An attempt asks for its present epoch and later ones, never for an earlier one. Returns a line for each epoch
        that has another order now than in the attempt before, whose samples are then not each used once.

        Raises:
            TrainingFailed: on all ranks: the task's function failed, or returned something wrong.
        """
        if step < self._until:
            return []
        plan = self._plan
        first, last = plan.epoch(step), plan.epoch(min(step + self._ahead, self._last_step))
        self._known = {epoch: indices for epoch, indices in self._known.items() if epoch >= first}
        for epoch in range(first, last + 1):
            if epoch not in self._known:
                with self._heart.doing(heartbeat.ORDERING):
                    self._known[epoch] = self._world.patient.on_first(functools.partial(self._made, epoch))
        self._until = (last + 1) * plan.steps_per_epoch - self._ahead
        return self._compared()

    def _compared(self) -> list[str]:
        """Note the digests of the known orders in the state. Returns lines as `ready`."""
        if self._digests is None:
            return []
        found = {epoch + 1: _digest(indices) for epoch, indices in self._known.items()}
        kept = sorted(found.items())[:_KEPT]
        self._digests.copy_(torch.tensor([*kept, *[(0, 0)] * (_KEPT - len(kept))]))
        differ = [epoch for epoch in found if self._before.pop(epoch, found[epoch]) != found[epoch]]
        return [
            f"{self._name} gives another order for epoch {epoch - 1} after an interruption than before: it depends on "
            "what training changes; let it depend only on its arguments"
            for epoch in differ
        ]

    def _made(self, epoch: int) -> Indices:
        try:
            indices = self._compute(epoch)
        except Refused as error:
            if error.__cause__ is not None and passes(error.__cause__):
                raise error.__cause__ from None  # this rank dies, and is started again
            raise TrainingFailed(str(error)) from error
        if len(indices) != self._plan.length:
            raise TrainingFailed(
                f"{self._name} returns {len(indices)} indices for epoch {epoch}, but {self._plan.length} when the run "
                "was launched; return as many for every epoch"
            )
        return indices

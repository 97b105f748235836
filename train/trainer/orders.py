"""The order of the samples that a task's own function gives: computed on rank 0, an epoch at a time, and sent to all.

The loop asks before each step, on the main thread of every rank. So sending is never mixed with other collectives,
and the random numbers that the function draws disturb nothing: all others are seeded before they are drawn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from ..data.fetch import passes
from ..data.plan import Plan
from ..data.sampling import Indices
from ..errors import Refused, TrainingFailed
from ..parallel.world import World
from ..run import heartbeat
from ..run.heartbeat import Heart


class Orders:
    """The orders of the epochs that a rank fetches now."""

    def __init__(
        self, compute: Callable[[int], Indices], *, name: str, plan: Plan, world: World, heart: Heart, ahead: int,
        total_steps: int,
    ) -> None:  # fmt: skip
        """
        Args:
            compute: returns the indices of an epoch; called on rank 0 alone.
            name: the task's function and its file, for messages.
            plan: has the length of every epoch.
            ahead: maximum number of steps that are fetched before the present one is over.
        """
        self._compute, self._name, self._plan = compute, name, plan
        self._world, self._heart, self._ahead, self._last_step = world, heart, ahead, total_steps - 1
        self._known: dict[int, Indices] = {}
        self._until = 0
        """The first step before which nothing has to be done."""

    def of(self, epoch: int) -> Indices:
        """Return the indices of an epoch that `ready` has made known."""
        return self._known[epoch]

    def ready(self, step: int) -> None:
        """Make known all epochs from which samples may be fetched in this step, counted from 0. A collective.

        An attempt asks for its present epoch and later ones, never for an earlier one.

        Raises:
            TrainingFailed: on all ranks: the task's function failed, or returned something wrong.
        """
        if step < self._until:
            return
        plan = self._plan
        first, last = plan.epoch(step), plan.epoch(min(step + self._ahead, self._last_step))
        self._known = {epoch: indices for epoch, indices in self._known.items() if epoch >= first}
        for epoch in range(first, last + 1):
            if epoch not in self._known:
                with self._heart.doing(heartbeat.ORDERING):
                    self._known[epoch] = self._world.patient.on_first(functools.partial(self._made, epoch))
        self._until = (last + 1) * plan.steps_per_epoch - self._ahead

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

"""Makes an error of one rank in an evaluation an error of all ranks, so that they can save the state together."""

from __future__ import annotations

import datetime
from collections.abc import Callable

import torch
import torch.distributed as dist

from ..parallel.world import World

_PATIENCE = datetime.timedelta(seconds=60)
"""Time that a rank with an error waits for the others. They may wait for that rank in a collective of the task."""


class Agreement:
    """What the ranks tell each other while they evaluate. They have a group of their own for it, because a task may use
    collectives, too."""

    def __init__(self, world: World, stop: Callable[[], bool], failed: Callable[[], None] | None) -> None:
        """
        Args:
            stop: whether this rank was asked to stop.
            failed: called on all ranks before an error of any of them is raised on all. None: only the rank that it
                happens on raises it, because the others wait for that rank in their forward.
        """
        self._stop, self._failed = stop, failed
        self._world = world.beside if failed is not None else world
        self.error: BaseException | None = None
        """An error of this rank, which it raises in the next collective."""

    def caught(self, error: BaseException) -> None:
        """Keep an error until the ranks meet, or raise it at once if they cannot."""
        if self._failed is None:
            raise error
        self.error = error

    def stops(self) -> bool:
        """Return whether a rank was asked to stop. A collective. Raises as `check`."""
        if self.error is not None:
            self._tell()
        elif not self._world.any(self._stop()):
            return False
        self.check()
        return True

    def check(self) -> None:
        """Raise the error of this rank, or DistError if only other ranks have one. A collective."""
        if self._failed is None:
            return
        if self.error is None and not self._world.any(False):
            return
        if self.error is not None:
            self._tell()
        self._failed()
        raise self.error or dist.DistError("the evaluation failed on another rank")

    def _tell(self) -> None:
        """Tell the others that this rank has an error. Raises the error if they do not hear it in time."""
        if self._world.size == 1:
            return
        flag = torch.ones(())
        try:
            dist.all_reduce(flag, group=self._world.group, async_op=True).wait(_PATIENCE)
        except RuntimeError:
            assert self.error is not None
            raise self.error from None

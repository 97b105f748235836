"""What a rank computes on that has no data of its own, where a forward is a collective and nobody may stay away."""

from __future__ import annotations

from typing import Any

import torch

from train.data.loader import to_device
from train.data.plan import MicroBatch
from train.parallel.world import World

Batch = tuple[MicroBatch, Any]


class Spare:
    """The last micro batch that a rank could read, for when not one sample of its next one can be.

    Until every rank has had one, the ranks ask each other: who has none is sent that of another.
    """

    def __init__(self, world: World, is_needed: bool) -> None:
        """
        Args:
            is_needed: whether samples may be left out at all; if not, every micro batch has some.
        """
        self._world, self._asks = world, is_needed
        self._last: Batch | None = None

    def instead_of(self, micro: MicroBatch, batch: Any) -> Batch | None:
        """These, or what to compute on in their place; None, on every rank alike, where no rank has had anything yet.

        A collective until every rank has had data.
        """
        if len(micro.indices):
            self._last = micro, batch
        if self._asks:
            self._ask()
        return self._last

    def _ask(self) -> None:
        have = self._world.gather(self._last is not None)
        if not any(have):
            return
        if not all(have):
            lender = have.index(True)
            box = None
            if self._world.rank == lender and self._last is not None:
                box = self._last[0], to_device(self._last[1], torch.device("cpu"))
            micro, batch = self._world.share(box, lender)
            self._last = self._last or (micro, to_device(batch, self._world.device))
        self._asks = False

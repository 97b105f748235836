"""Which micro batches of a step are whose. Imports no numpy: who looks at a run from outside asks it too."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass


def share(rank: int, micros: int, world: int, is_ordered: bool = False) -> range:
    """Which of a step's micro batches are a rank's: r, r + W, …; with `is_ordered` neighbours, ceil(r M / W) and on.

    No rank has more than ceil(M / W), nor less than that minus one.
    """
    if is_ordered:
        return range(-(-rank * micros // world), -(-(rank + 1) * micros // world))
    return range(rank, micros, world)


@functools.lru_cache  # nearly every step has as many
def _computed(rank: int, micros: int, world: int, is_ordered: bool) -> tuple[tuple[int, bool], ...]:
    own = [(number, False) for number in share(rank, micros, world, is_ordered)]
    again = [(micros - 1, True)] * (math.ceil(micros / world) - len(own))
    return (*own, *again)


@dataclass(frozen=True)
class Sharing:
    """How the micro batches of a step are shared among ranks."""

    rank: int = 0
    world: int = 1
    is_ordered: bool = False
    """Neighbouring ones to each rank, so that it can add up a part of a fixed order by itself."""

    def computed(self, micros: int) -> tuple[tuple[int, bool], ...]:
        """The numbers of the micro batches that a rank computes in a step of so many, as many as any rank does.

        Where it has none left it computes the last one of the step again: each comes with whether it is repeated.
        """
        return _computed(self.rank, micros, self.world, self.is_ordered)

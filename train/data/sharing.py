"""Which micro batches of a step are whose. Imports no numpy: who looks at a run from outside asks it too."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass


def share(rank: int, micros: int, world: int, is_ordered: bool = False) -> range:
    """Which of a step's micro batches are a rank's: r, r + W, …; with `is_ordered` neighbours, ceil(r M / W) and on.

    No rank has more than ceil(M / W), nor less than that minus one.
    """
    if is_ordered:
        return range(-(-rank * micros // world), -(-(rank + 1) * micros // world))
    return range(rank, micros, world)


@functools.lru_cache  # nearly every step has as many
def _slots(rank: int, micros: int, world: int, is_ordered: bool) -> tuple[int | None, ...]:
    own = tuple(share(rank, micros, world, is_ordered))
    return own + (None,) * (math.ceil(micros / world) - len(own))


@dataclass(frozen=True)
class Sharing:
    """How the micro batches of a step are shared among ranks."""

    rank: int = 0
    world: int = 1
    is_ordered: bool = False
    """Neighbouring ones to each rank, so that it can add up a part of a fixed order by itself."""
    lends: bool = False
    """Every rank gets as many: where it has none left, the last one of the step, marked as lent."""

    def slots(self, micros: int) -> tuple[int | None, ...]:
        """A rank's micro batches of a step with so many, as many as any rank has: None where it has none left."""
        return _slots(self.rank, micros, self.world, self.is_ordered)

    def fetched(self, micros: int) -> Iterator[tuple[int, bool]]:
        """The numbers of those that a rank fetches, and whether each is lent to it."""
        for number in self.slots(micros):
            if number is not None:
                yield number, False
            elif self.lends:
                yield micros - 1, True

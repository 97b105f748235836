"""Finds DataLoaders of the script that are read across the bodies of batches: no checkpoint holds their position.

`next(iterator)` in each step is such a loop. A DataLoader that is read from its first to its last batch within one
body, as for an evaluation, draws the same after a resume.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

_SAMPLERS: tuple[Any, ...] = (
    RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler,
)  # fmt: skip


class Strays:
    """Watches the samplers of torch, from which DataLoaders draw in the process that trains.

    Args:
        tell: called when one is found.
    """

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell, self._body, self._is_told = tell, 0, False
        for kind in _SAMPLERS:
            kind.__iter__ = self._watched(kind.__iter__)

    def body(self) -> None:
        """The body of a batch begins, or the work before or after all of an epoch's."""
        self._body += 1

    def _watched(self, draw: Callable[[Any], Iterator[int]]) -> Callable[[Any], Iterator[int]]:
        @functools.wraps(draw)
        def drawn(sampler: Any) -> Iterator[int]:
            began = self._body
            for index in draw(sampler):
                if self._body != began and not self._is_told:
                    self._is_told = True
                    self._tell()
                yield index

        return drawn

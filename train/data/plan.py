"""How a dataset is cut into epochs, global batches and micro batches. All arithmetic.

The content of a micro batch follows from (seed, epoch, step, micro batch) alone. So it makes no difference who fetches
it: the training process or a data worker, this rank or another, before or after a restart.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .order import order, seed_of

_CHUNK = 16384
"""Number of positions whose order is computed at a time: a vectorised call costs little more for many than for one."""

_CHOICE = -1
"""Used as the epoch in the order that chooses a part of a dataset's samples."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a dataset is cut into epochs, global batches and micro batches. All arithmetic, no state.

    Steps and epochs count from 0 here. The last global batch of an epoch may be short. No position of an epoch is
    dropped or repeated, unless `drop_last` leaves out that batch.
    """

    length: int
    """Number of samples of an epoch."""
    batch_size: int
    micro_batch_size: int
    seed: int = 0
    drop_last: bool = False
    is_even: bool = False
    """The micro batches of a step differ by at most one sample; else all but the last one are full."""
    limit: int = 0
    """Maximum number of samples of an evaluation set that are evaluated; 0: all."""
    part_of: int = 0
    """Number of samples of the dataset, of which `length` are chosen; 0: all are."""
    order: Callable[[int], npt.NDArray[np.int64]] | None = None
    """Returns the dataset indices of an epoch, as the task orders them; None: a keyed permutation of all samples."""

    @functools.cached_property
    def steps_per_epoch(self) -> int:
        return self.length // self.batch_size if self.drop_last else math.ceil(self.length / self.batch_size)

    @property
    def evaluated(self) -> int:
        """Number of samples that one evaluation of this set sees."""
        return min(self.length, self.limit) if self.limit else self.length

    @functools.cached_property
    def chosen(self) -> npt.NDArray[np.int64] | None:
        """The indices of the samples to train on, in the dataset's order; None: all."""
        return choice(self.seed, self.length, self.part_of) if self.part_of > self.length else None

    def indices(self, epoch: int, begin: int, end: int) -> npt.NDArray[np.int64]:
        """Return the dataset indices at positions begin <= position < end of an epoch."""
        if self.order is not None:
            return self.order(epoch)[begin:end]
        found = order(self.seed, epoch, np.arange(begin, end), self.length)
        return found if self.chosen is None else self.chosen[found]

    def epoch(self, step: int) -> int:
        return step // self.steps_per_epoch

    def epoch_of(self, done: int) -> int:
        """Return the epoch (counted from 1) of step `done` (counted from 1); 0 before the first step."""
        return self.epoch(done - 1) + 1 if done else 0

    def samples(self, step: int) -> int:
        """Return the true number of samples in the step's global batch."""
        return min(self.batch_size, self.length - step % self.steps_per_epoch * self.batch_size)

    def micro_batches(self, step: int) -> int:
        """Return the number of micro batches in the step's global batch."""
        return -(-self.samples(step) // self.micro_batch_size)

    def span(self, number: int, samples: int) -> tuple[int, int]:
        """Return the place of a micro batch in a global batch of this many samples: its first sample, and the one after
        its last.

        There are as many even micro batches as full ones, and the larger ones come first.
        """
        size = self.micro_batch_size
        if not self.is_even:
            return number * size, min(number * size + size, samples)
        least, larger = divmod(samples, -(-samples // size))
        low = number * least + min(number, larger)
        return low, low + least + (number < larger)

    def smallest(self, step: int) -> int:
        """Return the number of samples in the smallest micro batch of a step."""
        low, high = self.span(self.micro_batches(step) - 1, self.samples(step))
        return high - low


def choice(seed: int, count: int, length: int) -> npt.NDArray[np.int64]:
    """Return this many of a dataset's indices, sorted: a random choice that is always the same.

    The first samples of class folders are all of one class. A smaller choice is a part of a larger one.
    """
    return np.sort(order(seed, _CHOICE, np.arange(count), length))


def micro_batches_of_rank(rank: int, micros: int, *, world: int, is_ordered: bool = False) -> range:
    """Return which micro batches of a step are a rank's: r, r + W, …; with `is_ordered` neighbours, from ceil(r M / W)
    on.

    No rank has more than ceil(M / W), nor less than that minus one.
    """
    if is_ordered:
        return range(-(-rank * micros // world), -(-(rank + 1) * micros // world))
    return range(rank, micros, world)


@dataclass(frozen=True)
class Sharing:
    """How the micro batches of a step are shared among ranks."""

    rank: int = 0
    world: int = 1
    is_ordered: bool = False
    """Give each rank neighbouring micro batches, so that it can add up a part of a fixed order by itself."""

    @functools.lru_cache  # noqa: B019 - nearly every step has as many as the one before, and a process few of these
    def computed(self, micros: int) -> tuple[tuple[int, bool], ...]:
        """Return the numbers of the micro batches that a rank computes in a step of this many; every rank computes
        equally many.

        A rank that has none left computes the step's last one again, with weight 0. Each number comes with whether it
        is repeated.
        """
        own = [
            (number, False)
            for number in micro_batches_of_rank(self.rank, micros, world=self.world, is_ordered=self.is_ordered)
        ]
        repeated = [(micros - 1, True)] * (math.ceil(micros / self.world) - len(own))
        return (*own, *repeated)


class MicroBatch(NamedTuple):
    """What to fetch: dataset indices and the seed of everything random while fetching and computing them.

    A tuple, because each step makes one: a frozen dataclass of six fields takes 2 us more.
    """

    step: int
    number: int
    indices: npt.NDArray[np.int64]
    seed: int
    evaluation: int = 0
    """The number of its evaluation set, counted from 1; 0: the training set."""
    is_repeated: bool = False
    """Whether it is another rank's: this rank has none left in the step, and computes it again with weight 0."""
    epoch: int = 0
    """Counted from 0, like `step`. For an evaluation, those of the last step before it."""


def micro_batches_of(plan: Plan, sharing: Sharing, *, first: int, last: int) -> Iterator[MicroBatch]:
    """Yield what a rank fetches in steps first <= step < last, in order."""
    chunk_key, chunk = (-1, -1), np.empty(0, dtype=np.int64)
    size = max(_CHUNK // plan.batch_size, 1) * plan.batch_size
    for step in range(first, last):
        epoch, number_in_epoch = divmod(step, plan.steps_per_epoch)
        start = number_in_epoch * plan.batch_size
        stop = min(start + plan.batch_size, plan.length)
        if chunk_key != (epoch, start // size):
            chunk_key = (epoch, start // size)
            begin = chunk_key[1] * size
            chunk = plan.indices(epoch, begin, min(begin + size, plan.length))
        offset = start - chunk_key[1] * size
        for number, is_repeated in sharing.computed(-(-(stop - start) // plan.micro_batch_size)):
            low, high = plan.span(number, stop - start)
            indices, seed = chunk[offset + low : offset + high], seed_of(plan.seed, "train", epoch, step, number)
            yield MicroBatch(
                step=step, number=number, indices=indices, seed=seed, evaluation=0, is_repeated=is_repeated, epoch=epoch
            )


def evaluation_micro_batches(
    plan: Plan, sharing: Sharing, *, evaluation: int = 1, step: int = 0, epoch: int = 0
) -> Iterator[MicroBatch]:
    """Yield the micro batches of an evaluation set that a rank fetches: every sample once, in the dataset's order. All
    but the last are full.

    With a limit, a `choice` of them. `evaluation` is the number of the set; what is drawn at random does not depend on
    it, nor on the epoch.
    """
    chosen = choice(plan.seed, plan.evaluated, plan.length) if plan.evaluated < plan.length else None
    micros = math.ceil(plan.evaluated / plan.micro_batch_size)
    for number, is_repeated in sharing.computed(micros):
        low = number * plan.micro_batch_size
        high = min(low + plan.micro_batch_size, plan.evaluated)
        indices = np.arange(low, high) if chosen is None else chosen[low:high]
        seed = seed_of(plan.seed, "eval", number)
        yield MicroBatch(
            step=step,
            number=number,
            indices=indices,
            seed=seed,
            evaluation=evaluation,
            is_repeated=is_repeated,
            epoch=epoch,
        )

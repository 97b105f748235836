"""Ready-made orders of an epoch: drawn by weight, or grouped by length. Functions of (seed, epoch, position).

An order has all indices of an epoch, so its memory grows with the dataset: 8 bytes a sample.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .order import order, seed_of, uniform

Indices = npt.NDArray[np.int64]
WINDOW = 50
"""Maximum number of global batches whose samples are sorted together (as group_by_length of Hugging Face's Trainer)."""


def weighted(weights: npt.NDArray[np.float64], *, seed: int, epoch: int) -> Indices:
    """Draw as many samples as there are weights, with replacement, each as likely as its weight says."""
    ends = np.cumsum(weights)
    places = uniform(seed_of(seed, "weights"), epoch, len(weights)) * ends[-1]
    # a weight of 0 ends where it begins, so nothing falls into it, unless the last product rounds up to the sum
    return np.searchsorted(ends, np.minimum(places, np.nextafter(ends[-1], 0)), side="right")


def grouped(lengths: npt.NDArray[Any], *, seed: int, epoch: int, batch_size: int) -> Indices:
    """Return every sample once, those of similar length in the same global batch.

    The epoch's permutation is cut into windows of some global batches. A window is sorted by length and cut into its
    batches, which then take their places in random order. So a batch has one length, as have its micro batches of any
    size on any number of ranks, and a batch's length says nothing about its place.
    """
    count = len(lengths)
    window = batch_size * min(WINDOW, max(2, count // batch_size // 2))
    shuffled = order(seed, epoch, np.arange(count), count)
    made = []
    for begin in range(0, count, window):
        part = shuffled[begin : begin + window]
        part = part[np.argsort(lengths[part], kind="stable")]
        sizes = np.full(-(-len(part) // batch_size), batch_size)
        sizes[-1] = len(part) - batch_size * (len(sizes) - 1)  # the last batch of an epoch may be short
        places = order(seed_of(seed, "batches", begin), epoch, np.arange(len(sizes)), len(sizes))
        runs = np.split(part, np.cumsum(sizes[places])[:-1])
        made += [runs[turn] for turn in np.argsort(places)]
    return np.concatenate(made)

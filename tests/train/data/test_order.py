"""Which sample is seen at which position."""

from __future__ import annotations

import collections
import hashlib
import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from train.data.order import order, seed_of

pytestmark = pytest.mark.never_forgiven

SEEDS = st.integers(0, 2**63 - 1)


@settings(max_examples=150, deadline=None)
@given(seed=SEEDS, epoch=st.integers(0, 10**6), length=st.integers(1, 3000))
@example(0, 0, 1)
@example(0, 0, 2)
@example(0, 0, 1024)
@example(0, 0, 1025)
@example(2**63 - 1, 10**6, 2047)
def test_an_epoch_is_a_permutation(seed: int, epoch: int, length: int) -> None:
    indices = order(seed, epoch, np.arange(length), length)
    assert np.array_equal(np.sort(indices), np.arange(length))


def test_an_epoch_is_a_permutation_at_every_small_length() -> None:
    for length in range(1, 260):
        assert np.array_equal(np.sort(order(7, 3, np.arange(length), length)), np.arange(length))


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, length=st.integers(1, 3000), data=st.data())
def test_any_positions_in_any_order_give_what_the_whole_epoch_gives(
    seed: int, length: int, data: st.DataObject
) -> None:
    positions = data.draw(st.lists(st.integers(0, length - 1), max_size=20))
    whole = order(seed, 5, np.arange(length), length)
    assert order(seed, 5, positions, length).tolist() == whole[np.array(positions, dtype=int)].tolist()
    assert all(int(order(seed, 5, position, length)) == whole[position] for position in positions[:3])


def test_the_shape_of_the_positions_is_kept() -> None:
    assert order(0, 0, np.arange(12).reshape(3, 4), 20).shape == (3, 4)
    assert order(0, 0, [], 20).shape == (0,)
    assert order(0, 0, 3, 20).dtype == np.int64


@pytest.mark.parametrize(("other_seed", "other_epoch"), [(1, 0), (0, 1), (2**32, 0), (0, 2**32)])
def test_seed_and_epoch_change_the_order(other_seed: int, other_epoch: int) -> None:
    positions = np.arange(1000)
    same = order(0, 0, positions, 1000) == order(other_seed, other_epoch, positions, 1000)
    assert same.sum() < 10  # one in a thousand is expected


def test_neighbouring_lengths_do_not_share_their_order() -> None:
    same = order(0, 0, np.arange(999), 999) == order(0, 0, np.arange(999), 1000)
    assert same.sum() < 10


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_every_permutation_of_a_few_samples_occurs_about_equally_often(length: int) -> None:
    orders = list(itertools.permutations(range(length)))
    trials = 60 * len(orders)
    seen = collections.Counter(tuple(order(seed, 1, np.arange(length), length).tolist()) for seed in range(trials))
    expected = trials / len(orders)
    chi_squared = sum((seen[each] - expected) ** 2 / expected for each in orders)
    freedom = len(orders) - 1
    assert chi_squared < freedom + 6 * (2 * freedom) ** 0.5


def test_each_sample_comes_equally_often_at_each_position() -> None:
    length, trials = 37, 3700
    table = np.zeros((length, length))
    for seed in range(trials):
        table[np.arange(length), order(seed, 0, np.arange(length), length)] += 1
    expected = trials / length
    chi_squared = float(((table - expected) ** 2 / expected).sum())
    freedom = (length - 1) ** 2
    assert abs(chi_squared - freedom) < 6 * (2 * freedom) ** 0.5


def test_neighbours_in_the_data_set_do_not_stay_neighbours() -> None:
    steps = np.diff(order(11, 0, np.arange(10_000), 10_000))
    assert np.mean(np.abs(steps) == 1) < 0.002
    assert abs(np.corrcoef(order(11, 0, np.arange(10_000), 10_000), np.arange(10_000))[0, 1]) < 0.05


@pytest.mark.parametrize("length", [10**12, 2**32, 2**32 + 1, 2**62])
def test_no_memory_grows_with_the_length(length: int) -> None:
    positions = [0, 1, length // 2, length - 1]
    tracemalloc.start()
    try:
        indices = order(3, 2, positions, length)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100_000
    assert len(set(indices.tolist())) == 4
    assert all(0 <= index < length for index in indices.tolist())


def test_a_slice_of_a_huge_epoch_has_no_repetition_and_reaches_everywhere() -> None:
    length = 10**12
    indices = order(0, 0, np.arange(5 * 10**11, 5 * 10**11 + 20_000), length)
    assert len(np.unique(indices)) == 20_000
    counts = np.histogram(indices, bins=20, range=(0, length))[0]
    assert abs(counts - 1000).max() < 6 * 1000**0.5


@pytest.mark.parametrize(
    ("positions", "length"), [([-1], 10), ([10], 10), ([0, 3, 11], 10), ([0], 0), ([0], -5), ([10**12], 10**12)]
)
def test_a_position_out_of_range_is_an_error(positions: list[int], length: int) -> None:
    with pytest.raises(ValueError, match="must be in"):
        order(0, 0, positions, length)


def test_the_order_is_the_same_for_ever() -> None:
    # a changed permutation would make every run on disk resume with other samples, and no other test would notice
    assert order(1, 2, np.arange(8), 8).tolist() == [0, 3, 7, 1, 5, 2, 6, 4]
    assert order(1, 2, [0, 1, 10**12 - 1], 10**12).tolist() == [448384383124, 348088381116, 325269399168]
    assert seed_of(1, "train", 2) == 16583148845277096492


def test_seeds_of_different_parts_differ() -> None:
    parts = [(1, 23), (12, 3), (123,), ("1", "23", ""), (1, 23, 0), ("train", 1), ("eval", 1)]
    assert len({seed_of(*each) for each in parts}) == len(parts)


@pytest.mark.parametrize(
    ("length", "digest"),
    [
        (5, "48d0334952c17fc7"),
        (1437, "1bf60b28019c1ca5"),
        (4096, "478a085342076226"),
        (4097, "61756cc1ee15b118"),
        (50_000, "b7558d43e296de75"),
    ],
)
def test_the_order_stays_what_it_was_when_runs_began(length: int, digest: str) -> None:
    parts = [order(3, epoch, np.arange(min(length, 20_000)), length).tobytes() for epoch in range(3)]
    assert hashlib.sha256(b"".join(parts)).hexdigest()[:16] == digest

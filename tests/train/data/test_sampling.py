"""Orders of an epoch that are drawn by weight or grouped by length."""

from __future__ import annotations

import numpy as np
import pytest

from train.data import sampling
from train.data.order import uniform
from train.data.sampling import WINDOW, grouped, weighted


def test_each_sample_is_drawn_as_often_as_its_weight_says() -> None:
    weights = np.array([0.0, 1.0, 2.0, 0.0, 5.0, 0.0] * 50)
    drawn = np.concatenate([weighted(weights, seed=3, epoch=epoch) for epoch in range(400)])
    assert drawn.dtype == np.int64 and len(drawn) == 400 * 300
    counts = np.bincount(drawn, minlength=300)
    expected = weights / weights.sum() * len(drawn)
    assert not counts[weights == 0].any()
    deviations = (counts - expected)[weights > 0] / np.sqrt(expected[weights > 0])
    assert np.abs(deviations).max() < 5 and 0.7 < deviations.std() < 1.3


def test_a_sample_that_alone_has_a_weight_is_drawn_always() -> None:
    for place in (0, 1, 2):
        weights = np.zeros(3)
        weights[place] = 1e-300
        assert weighted(weights, seed=0, epoch=0).tolist() == [place] * 3


def test_places_on_a_border_belong_to_a_sample_with_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "uniform", lambda *_: np.array([0.0, 0.5, 0.5 - 2**-54, 1 - 2**-53, 0.0, 0.0]))
    assert weighted(np.array([0, 0, 1, 0, 1, 0.0]), seed=0, epoch=0).tolist() == [2, 4, 2, 4, 2, 2]


def test_epochs_and_seeds_draw_otherwise_and_always_the_same() -> None:
    weights = np.ones(1000)
    first = weighted(weights, seed=0, epoch=0)
    assert np.array_equal(first, weighted(weights, seed=0, epoch=0))
    for seed, epoch in ((0, 1), (1, 0)):
        assert (first == weighted(weights, seed=seed, epoch=epoch)).mean() < 0.02
    assert first[:8].tolist() == [502, 481, 799, 694, 543, 512, 229, 530]  # earlier runs rely on it


def test_uniform_numbers_are_uniform_and_independent_of_their_place() -> None:
    numbers = uniform(5, 2, 100_000)
    assert numbers.min() >= 0 and numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=100, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 150  # chi-squared with 99 degrees of freedom: 1 in 1000
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.02
    assert abs(np.corrcoef(numbers, np.arange(100_000))[0, 1]) < 0.02


@pytest.mark.parametrize("count", [1, 7, 16, 17, 55, 1000, 10_007])
def test_grouped_by_length_every_sample_comes_once_and_a_batch_has_similar_lengths(count: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, count)
    made = grouped(lengths, seed=1, epoch=2, batch_size=16)
    assert np.array_equal(np.sort(made), np.arange(count))
    if count < 1000:
        return
    batches = [lengths[made[begin : begin + 16]] for begin in range(0, count, 16)]
    padded, least = sum(len(one) * one.max() for one in batches), lengths.sum()
    assert padded < 1.1 * least  # in random order nearly twice as much


def test_the_length_of_a_batch_does_not_depend_on_its_place() -> None:
    count = 16 * WINDOW * 40
    lengths = np.random.default_rng(0).integers(1, 1000, count)
    means = lengths[grouped(lengths, seed=1, epoch=0, batch_size=16)].reshape(-1, 16).mean(1)
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.08
    within = means.reshape(-1, WINDOW)  # nor on its place in a window
    assert np.ptp(within.mean(0)) < 0.6 * np.ptp(means)
    assert abs(np.corrcoef(within.ravel(), np.tile(np.arange(WINDOW), 40))[0, 1]) < 0.08


def test_another_epoch_groups_otherwise_even_a_small_dataset() -> None:
    lengths = np.arange(64) % 5
    one, other = (grouped(lengths, seed=0, epoch=epoch, batch_size=16) for epoch in (0, 1))
    assert [set(one[:16]), set(one[16:32])] != [set(other[:16]), set(other[16:32])]

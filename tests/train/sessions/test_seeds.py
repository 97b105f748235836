"""What a session seeds: every generator that a loop may draw from, by numbers that a resume knows too."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from train.data.seeding import owned
from train.sessions import seeds

pytestmark = pytest.mark.never_forgiven


class Holder:
    def __init__(self) -> None:
        self.numpy, self.torch = np.random.default_rng(0), torch.Generator()


def draws(holder: Holder | None = None) -> tuple[float, ...]:
    shared = random.random(), np.random.rand(), torch.rand(1).item()
    if holder is None:
        return shared
    return *shared, holder.numpy.random(), torch.rand(1, generator=holder.torch).item()


def test_a_step_draws_the_same_whatever_was_drawn_before() -> None:
    holder = Holder()
    own = owned(holder)
    seeds.before_step(0, 7, 1, own)
    expected = draws(holder)
    for _ in range(3):
        draws(holder)
    seeds.before_step(0, 7, 1, own)
    assert draws(holder) == expected


def test_steps_ranks_epochs_and_places_draw_different_numbers() -> None:
    found = []
    for seed in (0, 1):
        for step in (0, 1):
            for rank in (0, 1):
                seeds.before_step(seed, step, rank)
                found.append(draws())
        for epoch in (0, 1):
            seeds.begin_epoch(seed, epoch)
            found.append(draws())
            for rank in (0, 1):
                seeds.after_pass(seed, epoch, rank)
                found.append(draws())
        for begin in (seeds.at_start, seeds.after_register):
            begin(seed)
            found.append(draws())
    for one in zip(*found, strict=True):
        assert len(set(one)) == len(found)


def test_a_session_begins_as_a_script_that_calls_manual_seed() -> None:
    torch.manual_seed(5)
    weight = torch.nn.Linear(3, 3).weight
    seeds.at_start(5)
    assert torch.equal(torch.nn.Linear(3, 3).weight, weight)

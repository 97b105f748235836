"""Which steps save: what was intervals while a run died and went on from memory is not forgotten."""

import itertools
import math

import pytest

from train.trainer.intervals import Intervals, SaveClock


@pytest.mark.parametrize("save_every", [None, 1, 3, 7])
@pytest.mark.parametrize("evaluate_every", [0, 2.5, 4, math.inf])
@pytest.mark.parametrize("saves_evaluations", [False, True])
def test_a_save_is_missing_where_one_of_the_steps_since_the_newest_saves(
    save_every: int | None, evaluate_every: float, saves_evaluations: bool
) -> None:
    intervals = Intervals(20, evaluate_every, save_every, saves_evaluations)
    saves = {step for step in range(1, 21) if save_every and step % save_every == 0} | {20}
    if saves_evaluations:
        saves |= {step for step in range(1, 21) if intervals.evaluates(step)}
    assert {step for step in range(21) if intervals.saves(step)} == saves
    for saved, step in itertools.product(range(21), repeat=2):
        assert intervals.misses_save(saved, step) == any(saved < one <= step for one in saves), (saved, step)


def test_a_clock_counts_what_has_passed_before() -> None:
    time = 100.0
    clock = SaveClock(1, since=50, now=lambda: time)
    assert not clock.is_due()
    time = 110.0
    assert clock.is_due()
    clock.restart()
    time = 169.0
    assert not clock.is_due()

"""What is measured of some steps stands for all of them."""

from __future__ import annotations

import time

import torch

from train.parallel.exposed import Exposed


def test_the_steps_that_are_measured_stand_for_those_between() -> None:
    for steps in (1, 16, 17, 31, 32, 100):
        exposed = Exposed(torch.device("cpu"))
        measured = 0
        for _ in range(steps):
            exposed.begin()
            measured += exposed.is_on
            if exposed.is_on:
                exposed.add(0.0, 0.5)
        assert abs(exposed.seconds() - 0.5 * steps) < 1e-9
        assert measured == min(steps, 16) + max(steps // 16 - 1, 0)


def test_what_is_waited_for_counts_and_outside_of_steps_nothing_does() -> None:
    exposed = Exposed(torch.device("cpu"))
    with exposed.waiting():
        time.sleep(0.01)
    assert exposed.seconds() == 0
    exposed.begin()
    with exposed.waiting():
        time.sleep(0.05)
    assert exposed.seconds() >= 0.05

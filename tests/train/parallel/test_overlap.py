"""What is measured of some steps stands for all of them."""

from __future__ import annotations

import time

import torch

from train.parallel.overlap import CommunicationTime


def test_the_steps_that_are_measured_stand_for_those_between() -> None:
    for steps in (1, 16, 17, 31, 32, 100):
        communication = CommunicationTime(torch.device("cpu"))
        measured = 0
        for _ in range(steps):
            communication.begin()
            measured += communication.is_timed
            if communication.is_timed:
                communication.add(0.0, 0.5)
        assert abs(communication.seconds() - 0.5 * steps) < 1e-9
        assert measured == min(steps, 16) + max(steps // 16 - 1, 0)


def test_what_is_waited_for_counts_and_outside_of_steps_nothing_does() -> None:
    communication = CommunicationTime(torch.device("cpu"))
    with communication.waiting():
        time.sleep(0.01)
    assert communication.seconds() == 0
    communication.begin()
    with communication.waiting():
        time.sleep(0.05)
    assert communication.seconds() >= 0.05

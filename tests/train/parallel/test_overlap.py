"""What a rank waits for is timed."""

from __future__ import annotations

import time

import torch

from train.parallel.overlap import DeviceTimer


def test_what_is_waited_for_counts_and_what_lies_between_does_not() -> None:
    timer = DeviceTimer(torch.device("cpu"))
    for _ in range(2):
        with timer.waiting():
            time.sleep(0.05)
        time.sleep(0.5)
    assert 0.1 <= timer.seconds() < 0.5

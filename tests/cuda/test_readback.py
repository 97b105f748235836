"""The sums of a step come to the host by memory that is used again."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.cuda import standin

pytestmark = pytest.mark.minutes

READ = """
import torch
from train.trainer.step_stats import Readback

readback, read, places = Readback(torch.device("cuda", 0)), [], set()
for number in range(9):
    count = 7 if number % 3 == 0 else 6  # a norm is logged in some steps
    readback.put(number, torch.full((count,), float(number)).cuda())
    places.add(readback._pending[-1][1].data_ptr())
    read += [(step, sums["loss"], len(sums)) for step, (sums,) in readback.take(everything=number == 8)]
assert read == [(number, float(number), 7 if number % 3 == 0 else 6) for number in range(9)], read
assert len(places) < 9, "each step takes memory of its own"
print("read")
"""


def test_each_step_is_read_with_its_own_sums() -> None:
    command = [sys.executable, "-c", READ]
    done = subprocess.run(command, env=os.environ | standin.environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "read\n"), done.stderr

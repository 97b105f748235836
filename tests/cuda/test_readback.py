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
from train.trainer.step_stats import LOSS, Readback, StepResult

readback, read, places = Readback(torch.device("cuda", 0)), [], set()
for number in range(9):
    sums = torch.full((6,), float(number), dtype=torch.float64).cuda()  # the stand-in joins numbers of one type
    norm = torch.tensor(number + 0.5, dtype=torch.float64).cuda()
    figures = {"grad_norm": norm} if number % 3 == 0 else {}  # a norm is logged in some steps
    readback.put(number, StepResult({"": sums}, figures, []))
    places.add(readback._pending[-1][3].data_ptr())
    read += [(step, sums[""][LOSS], figures) for step, sums, figures in readback.take(everything=number == 8)]
assert read == [(n, float(n), {"grad_norm": n + 0.5} if n % 3 == 0 else {}) for n in range(9)], read
assert len(places) < 9, "each step takes memory of its own"
print("read")
"""


def test_each_step_is_read_with_its_own_sums() -> None:
    command = [sys.executable, "-c", READ]
    done = subprocess.run(command, env=os.environ | standin.environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "read\n"), done.stderr

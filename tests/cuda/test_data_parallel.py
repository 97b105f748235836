"""nn.DataParallel: one process with several GPUs of the stand-in, as `train bench scaling` measures it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.cuda import standin
from tests.cuda.conftest import GpuStation
from train.bench.scaling import STEPS

pytestmark = [pytest.mark.minutes, pytest.mark.skipif(bool(standin.lacks()), reason=standin.lacks())]

WEIGHTS = 512 * 1024 + 1024 * 1024 + 1024 * 10 + 1024 + 1024 + 10
"""Number of parameters of the perceptron that is measured."""


def test_scaling_measures_data_parallel_in_one_process_over_all_gpus(tmp_path: Path) -> None:
    machine = GpuStation(tmp_path, 2, caching=True)
    try:
        found = json.loads(machine.ok("bench", "scaling", "--strategies", "ddp", "--times", 1, "--json").stdout)
    finally:
        machine.close()
    rows = {row["way"]: row for row in found["rows"] if row["ranks"] == 2}
    assert list(rows) == ["DDP by hand", "ddp", "DataParallel"] and found["missing"] == []
    row, hand = rows["DataParallel"], rows["DDP by hand"]
    assert row["samples_per_s"] == pytest.approx(hand["samples_per_s"] / row["by_hand"])
    assert row["memory"] > 4 * WEIGHTS
    sent = Counter(re.sub(r"nccl (\w+)\((.*)\) .*", r"\1 \2", call) for call in _calls_of_both_gpus(machine))
    # blocks: 3 of STEPS steps, and for the memory 3 of one step; each GPU makes its part of a call
    assert sent == {
        f"Broadcast {WEIGHTS} float32, root 0": 6 * STEPS + 6,
        f"Reduce {WEIGHTS} float32, sum, root 0": 6 * STEPS + 6,
    }


def _calls_of_both_gpus(machine: GpuStation) -> list[str]:
    """Return the collectives of the processes that opened two GPUs."""
    opened = [pid for pid, contexts in machine.calls("context").items() if len(set(contexts)) == 2]
    assert len(opened) == 2  # one measures the time, one the memory
    calls = machine.calls("nccl")
    return [call for pid in opened for call in calls[pid] if "CommInit" not in call]


def test_one_process_moves_data_between_its_gpus() -> None:
    code = """
import torch
from torch.nn.parallel import comm
ones = torch.arange(5.).cuda()
copies = comm.broadcast(ones, [0, 1])
total = comm.reduce_add(copies, destination=0)
print([str(copy.device) for copy in copies], copies[1].tolist(), total.tolist())
"""
    added = standin.environment(2)
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | added, capture_output=True, text=True, check=False
    )
    assert done.stdout == "['cuda:0', 'cuda:1'] [0.0, 1.0, 2.0, 3.0, 4.0] [0.0, 2.0, 4.0, 6.0, 8.0]\n", done.stderr

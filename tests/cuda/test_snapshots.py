"""Snapshots that a GPU copies on a stream of its own: what runs before and after what, and that nothing waits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda import standin

pytestmark = pytest.mark.minutes

ROOT = Path(__file__).parents[2]
BESIDE = """
import mmap, torch
from torch import nn
from train.checkpoint.extra import Extra
from train.checkpoint.serialize import serialize
from train.checkpoint.side_copy import SideCopy
from train.checkpoint.staging import PinnedMemory
from train.checkpoint.state_dict import TrainState
from train.parallel.precision import Precision

def event():
    made = torch.cuda.Event(enable_timing=True)
    made.record()
    return made

gpu, half_a_second = torch.device("cuda", 0), 1_000_000_000
model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).to(gpu)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for parameter in model.parameters():
    parameter.grad = torch.ones_like(parameter)
optimizer.step()
extra = Extra({"average": torch.ones(8, device=gpu)}, {"own": nn.BatchNorm1d(5, device=gpu)})
state = TrainState(module=model, optimizer=optimizer, precision=Precision("fp32", gpu), extra=extra)
stream = torch.cuda.Stream(gpu)
memory = PinnedMemory(mmap.mmap(-1, 1 << 20), gpu, "")
torch.cuda.set_sync_debug_mode("error")
with extra.unchanged(gpu):  # as in an evaluation
    pass
serialized = serialize(state, "", 1, "")
rests = [sum(t.numel() for t, rest in zip(serialized.tensors, serialized.rest_until_update) if rest is which)
         for which in (True, False)]
weights, statistics = 64 * 64 + 3 * 64, 2 * 64 + 1
assert rests == [3 * weights + 4 + 8, statistics + 4 * 5 + 1], rests
torch.cuda._sleep(half_a_second)  # the update before
updated = event()
side = SideCopy(serialized, memory.bytes, gpu, stream)
with torch.cuda.stream(stream):
    torch.cuda._sleep(half_a_second)  # as if the copy took so long
    side._ended = event()
computed = event()
side.hold()
held = event()
torch.cuda.set_sync_debug_mode("default")
assert updated.query() is held.query() is False, "the host has waited"
taken = side.wait()
assert updated.elapsed_time(side._at_rest) >= 0, "the statistics are copied before the update ends"
assert side._at_rest.elapsed_time(side._ended) >= 500, "the weights are copied before the update ends"
assert computed.elapsed_time(side._ended) > 400, "the forward waits for the copy"
assert side._ended.elapsed_time(held) >= 0, "the next update does not wait for the copy"
assert 0.5 < taken < 1, taken  # the wait, and a part of the time beside the forward
print("seen")
"""

ALWAYS = """

import os
import threading
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from train.checkpoint import snapshot

read, steps = snapshot.Snapshots.stats_read, [0]

def stats_read(self, step, requests):  # no kernel has added the ranks' requests
    read(self, step, float(bool(self._requested and self._requested[0])))

def strict(optimizer, *_):
    steps[0] += 1  # two of three steps have two updates
    for thread in threading.enumerate() if steps[0] == 8 else ():
        if thread.name.startswith(("reserve", "snapshot")):
            thread.join()
    if os.environ["TRAIN_ATTEMPT"] == "1":  # it dies before it saves
        torch.cuda.set_sync_debug_mode("error" if steps[0] >= 8 else "default")

snapshot.SHARE, snapshot.Snapshots.stats_read = 1e9, stats_read
register_optimizer_step_post_hook(strict)
"""
"""The end of a task: the state is copied whenever the last copy is sealed, and what waits for the GPU is an error."""
KILLED = """
import sys
from pathlib import Path
from tests.gpu.harness import train_forked
from train.launcher import checks
from train.launcher.request import Request
from train.run import folders
from train.supervise.decide import LaunchMode

flags = {"device": "cuda", "steps": "24", "batch_size": "32", "ema.decay": "0.9", "eval.every_epochs": "0",
         "data.workers": "0", "log.tensorboard": "false"}
prepared = checks.prepare(Request(sys.argv[1], flags=flags), ranks=1)
run = folders.create(Path(sys.argv[2]), "killed", files=prepared.files, record=prepared.record)
record = train_forked(run, fault="snapshot.written:4", mode=LaunchMode.LAUNCHED)
print(record["state"], *(attempt["from_step"] for attempt in record["attempts"]))
print(*((run.logs(n) / "rank0.log").read_text() for n in range(1, len(record["attempts"]) + 1)), file=sys.stderr)
"""


def _run(added: dict[str, str], *arguments: str) -> str:
    command, environ = [sys.executable, "-c", *arguments], os.environ | added | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout if not done.stdout.startswith("failed") else done.stdout + done.stderr


def test_a_rank_killed_in_a_copy_resumes_from_the_one_before_and_no_step_has_waited(tmp_path: Path) -> None:
    """With two updates, averaged weights and objects of the task's own."""
    task = tmp_path / "own.py"
    task.write_text((ROOT / "tests/gpu/tasks/own.py").read_text() + ALWAYS)
    state, first, second, *_ = _run(standin.environment(), KILLED, str(task), str(tmp_path / "runs")).split()
    assert state == "finished" and int(first) == 0 < 5 < int(second) < 15


def test_weights_are_copied_beside_a_forward_and_the_update_waits(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert _run(standin.environment(log=log), BESIDE) == "seen\n"
    before_wait = log.read_text().partition("sync event")[0].splitlines()
    to_host = [line.split()[1:] for line in before_wait if line.split()[1:3] == ["copy", "d"] and "p" in line.split()]
    assert len(to_host) > 10 and {words[-1] for words in to_host} == {"async"}

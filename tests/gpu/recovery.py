"""What the death of a rank costs on the device, beside plain torchrun and torch.save, and what is left of it there.

As `python -m benchmarks.recovery` has it on CPUs, on two GPUs, on one where there are no more. Ours is what
`train launch` starts, forked ranks and snapshots in memory, without tmux.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator

import psutil
import torch

from benchmarks import recovery as bench
from tests.gpu import in_rank
from tests.gpu.harness import (
    BELOW,
    FAILED,
    FIGURE,
    OK,
    UNCHECKED,
    Case,
    Row,
    Scale,
    mebibytes,
    new_run,
    reason,
    train_forked,
)
from tests.waiting import eventually
from train.checkpoint.buffers import Buffers
from train.run import states
from train.run.run_folder import Run
from train.supervise.decide import LaunchMode
from train.supervise.ranks import TaskRanks
from train.zygote.client import lives

KILLED = 0.6
"""Of the steps, after which a rank is killed."""
SHARE = 0.25
"""Of plain torchrun's time to a new step, at most."""
PATIENCE = 25.0
"""Seconds without a new step after which plain torchrun hangs, which it does at about half of such restarts."""
GOAL = 2.0
"""Seconds to a new step."""
_WITHIN = 64 * 2**20
"""Bytes that other users of the device may have taken or given back meanwhile."""
_LEFT, _COPYING = "what SIGKILL leaves", "killed while a snapshot is copied"


def part(scale: Scale) -> Iterator[Case]:
    """One death of each kind, one with loader processes, and one while a snapshot is copied."""
    ranks = 2 if not scale.is_gpu or scale.gpus > 1 else 1
    yield Case(f"a rank of {ranks} is killed", _killed, (scale, ranks))
    yield Case(_LEFT, _left, (scale,))
    yield Case(_COPYING, _copying, (scale,))


def _killed(scale: Scale, ranks: int) -> Iterator[Row]:
    """An undisturbed run, one whose rank is killed, and plain torchrun with a rank killed."""
    what = f"a rank of {ranks} is killed"
    steps = 200 if scale.is_small else 4000
    flags = scale.flags("perceptron") | {"steps": steps, "log.every_steps": 1}  # memory alone has a state to go on from
    drawn, ends = random.Random(0), list[bench.Found]()
    with new_run(scale, "perceptron", flags, ranks) as run:
        whole = train_forked(run, ranks)
    with new_run(scale, "perceptron", flags, ranks) as run:

        def watch(processes: TaskRanks) -> None:
            ends.append(bench.live(Kept(run, processes), [int(KILLED * steps)], drawn, patience=PATIENCE))

        killed = train_forked(run, ranks, mode=LaunchMode.LAUNCHED, watch=watch)
    for record in (whole, killed):
        if record["state"] != states.FINISHED:
            yield Row(what, f"{record['state']}: {reason(record)}", FAILED)
            return
    if not ends[0].recoveries:
        yield Row(what, "it was over before memory had a state, and a rank could be killed", FAILED)
        return
    is_equal, from_step = whole["weights_sha256"] == killed["weights_sha256"], killed["attempts"][-1]["from_step"]
    found = f"goes on after step {from_step}: {'equal' if is_equal else 'another digest'}"
    yield Row(what, found, OK if is_equal and from_step else FAILED, "equal digests")
    yield Row("steps made twice", str(ends[0].twice), FIGURE, "none", {"twice": ends[0].twice})
    plain = bench.Bare(scale.folder, "torchrun", steps, ranks, scale.device)
    died = bench.live(plain, [int(KILLED * steps)], drawn, patience=PATIENCE)
    ours, other = ends[0].recoveries[0], min(died.recoveries, default=None)
    beside = f"plain torchrun {other:.2f}, which makes {died.twice} steps twice" if other else "plain torchrun hangs"
    verdict = FIGURE if not scale.is_gpu else OK if ours <= max(GOAL, SHARE * (other or 0.0)) else BELOW
    figures = {"seconds": ours, "torchrun_s": other, "torchrun_twice": died.twice}
    yield Row("seconds to a new step", f"{ours:.2f}; {beside}", verdict, f"{GOAL:g}, or {SHARE} of torchrun's", figures)


class Kept(bench.Launched):
    """A run of ours, of which this process is the agent."""

    def __init__(self, run: Run, processes: TaskRanks) -> None:
        self.run, self._processes = run, processes

    def ranks(self) -> list[int]:
        """Its ranks, once memory has a state: on a fast card a kill could come before the first one."""
        pids = self.run.read()["pids"].get("ranks", [])
        memory = self._processes.memory
        return list(pids) if len(pids) == self._processes.count and memory is not None and memory.step else []

    def lives(self) -> bool:
        return self.run.read()["state"] in (states.CREATED, states.RUNNING)

    def end(self) -> None:
        if self.lives():
            self.run.ask_stop(states.NOW)


def _left(scale: Scale) -> Iterator[Row]:
    """Kill a run with loader processes while it trains: its memory is free again, and its processes are gone."""
    before = _free(scale)
    family, used, died = list[int](), 0, 0.0

    def trains() -> list[int]:
        record = run.read()
        return record["pids"].get("ranks", []) if record.get("step", 0) >= 20 else []

    def kill(processes: TaskRanks) -> None:
        nonlocal used, died
        (rank,) = eventually("20 steps", trains, seconds=60)
        used = before - _free(scale)
        family.extend([rank, *(process.pid for process in psutil.Process(rank).children(recursive=True))])
        os.kill(rank, signal.SIGKILL)
        died = time.monotonic()

    flags = scale.exact_flags("gpt") | {"steps": 1_000_000, "data.workers": 2}
    with new_run(scale, "gpt", flags) as run:
        train_forked(run, watch=kill)
    what = "memory of the device freed after SIGKILL"
    eventually("an end of its processes", lambda: not any(map(lives, family)), seconds=20)
    yield Row("processes gone after SIGKILL", f"all {len(family)}", OK, "all")
    if not scale.is_gpu:
        yield Row(what, "a CPU has none of its own", UNCHECKED)
        return
    eventually(
        lambda: f"{mebibytes(before - _free(scale))} are missing", lambda: before - _free(scale) <= _WITHIN, seconds=20
    )
    seconds = time.monotonic() - died
    yield Row(what, f"{mebibytes(used)} in {seconds:.1f} s", OK, "all of it", {"seconds": seconds, "used": used})


def _copying(scale: Scale) -> Row:
    """Kill a rank whose older snapshot is being overwritten: the newer one must be whole."""
    flags = scale.exact_flags("gpt") | {"precision": "bf16", "steps": 150 if scale.is_gpu else 30}
    left: list[int] = []

    def kill(processes: TaskRanks) -> None:
        assert processes.memory is not None
        buffers = Buffers(processes.memory.address)
        ready = eventually("two snapshots", lambda: len(buffers.steps) == 2 and processes.pids, seconds=60, every=0)
        eventually("a copy", lambda: len(buffers.steps) == 1, seconds=60, every=0)
        os.kill(ready[0], signal.SIGKILL)
        left.extend(buffers.steps)

    # a CPU copies in a moment too short to be met
    fault, watch = ("", kill) if scale.is_gpu else ("snapshot.written:8:kill", lambda processes: None)
    with new_run(scale, "gpt", flags) as run:
        whole = train_forked(run)
    with new_run(scale, "gpt", flags) as run:
        killed = train_forked(run, fault=fault, mode=LaunchMode.LAUNCHED, watch=watch, changes=[in_rank.SNAPSHOTS])
    for record in (whole, killed):
        if record["state"] != states.FINISHED:
            return Row(_COPYING, f"{record['state']}: {reason(record)}", FAILED)
    is_equal, starts = whole["weights_sha256"] == killed["weights_sha256"], [a["from_step"] for a in killed["attempts"]]
    found = f"goes on after step {', '.join(map(str, starts[1:]))}: {'equal' if is_equal else 'another digest'}"
    if left and left != starts[1:2]:  # the kill came a moment too late
        found += f"; when it was killed, the snapshot of step {left[0]} was whole"
    return Row(_COPYING, found, OK if is_equal and all(starts[1:]) and starts[1:] else FAILED, "equal digests")


def _free(scale: Scale) -> int:
    return torch.cuda.mem_get_info()[0] if scale.is_gpu else 0

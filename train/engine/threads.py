"""CPU threads per rank: what the user set, else as many as there is work for in a micro batch of this model.

Another number gives other bits, so two launches of one request have to come to the same: work is counted in operations,
never in time. It is counted once, before a run is created, and the number is recorded in the run's configuration; in a
forked process that is thrown away: whatever the task does there, it changes nothing here.
"""

from __future__ import annotations

import os
import select
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from train import cores

GRAIN = 1e9
"""Floating-point operations of a micro batch, forward and backward, that a thread must have: some 20 ms on one core.

With less, threads wait for each other longer than they work; beside other work on the same cores they lose a multiple.
docs/benchmarks.md has the figures.
"""
_MOST_LOADERS = 8
"""Loader processes that a rank takes by itself: each holds some batches in shared memory."""
_LIMIT = 15.0
"""Seconds that counting may take. What takes longer is no small model: it gets the fair share."""


def of_environment() -> tuple[int, str] | None:
    """What the user set, and where; in the order in which torch looks. None where nobody did, or it is no number."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        first = os.environ.get(name, "").split(",")[0].strip()
        if first.isdecimal() and 1 <= int(first) <= 4096 and not _is_torchruns(name, first):
            return int(first), name
    return None


def _is_torchruns(name: str, value: str) -> bool:
    """Whether torchrun set it, and not its user: it sets OMP_NUM_THREADS to 1 in its own environment where unset."""
    if name != "OMP_NUM_THREADS" or value != "1" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    try:  # the kernel shows what a process was started with
        return f"\0{name}=".encode() not in b"\0" + Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:
        return True


def share(ranks: int) -> int:
    """The cores that this process may use, over the ranks; at least 1."""
    return max(1, int(cores.usable() // ranks))


def loaders(ranks: int, device: torch.device, is_indexed_at_once: bool) -> int:
    """Loader processes of a rank, where the user set none.

    Args:
        is_indexed_at_once: whether a batch is one indexing of tensors, which costs less than another process.
    """
    if device.type == "cpu" or is_indexed_at_once:
        return 0
    return min(max(share(ranks) - 1, 1), _MOST_LOADERS)


def choose(ranks: int, device: torch.device, rehearse: Callable[[], Callable[[], None]]) -> tuple[int, str]:
    """How many threads a rank takes, and why.

    Args:
        rehearse: called in a process of its own; returns the forward and backward of a micro batch.
    """
    wish = of_environment()
    if wish is not None:
        return wish[0], f"by {wish[1]}"
    most = share(ranks)
    if most == 1 or device.type != "cpu":
        return most, "a fair share of the cores"
    operations = _operations(rehearse)
    if operations is None:
        return most, "a fair share of the cores; what a micro batch takes could not be counted"
    found = min(most, max(1, int(operations / GRAIN)))
    return found, f"a micro batch takes {operations / 1e9:.3g} GFLOP, and a thread should have 1 of it"


def _operations(rehearse: Callable[[], Callable[[], None]]) -> float | None:
    """Floating-point operations of a step in matrix products, convolutions and attention; None where it fails."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a fork beside other threads: the child is killed if it should hang
        child = os.fork()
    if child == 0:
        try:
            nothing = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(nothing, fd)
            os.write(writer, b"%d" % _count(rehearse()))
        finally:
            os._exit(0)
    os.close(writer)
    answer, deadline = b"", time.monotonic() + _LIMIT
    try:
        while select.select([reader], [], [], max(deadline - time.monotonic(), 0))[0]:
            part = os.read(reader, 4096)
            if not part:
                break
            answer += part
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return float(answer) if answer else None


def _count(step: Callable[[], None]) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    torch.set_num_threads(1)
    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())

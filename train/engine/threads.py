"""CPU threads per rank: what the user set, else as many as pay off for a step of this model.

Measured once, before a run is created, and recorded in its configuration: another number gives other bits. In a forked
process that is thrown away: whatever the task does there, it changes nothing here.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

_LIMIT = 2.0
"""Seconds that measuring may take beside other work; on a machine of one's own it takes a tenth of that. What is not
known at all then is a long step, which many threads suit."""
_LONG = 0.1
"""Seconds of a step on one thread that need no further measuring: it is no small model."""
_GAIN = 0.3
"""The part of what twice as many threads could gain that they must: beside other work they lose a multiple of it."""
_ENOUGH, _AT_MOST = 0.05, 30
"""Seconds, and steps, that are measured on each number of threads."""


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
    cores = float(len(os.sched_getaffinity(0)))
    with contextlib.suppress(OSError, ValueError):  # a container's limit
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        cores = min(cores, int(quota) / int(period))
    return max(1, int(cores // ranks))


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
    measured = _measured(rehearse, most)
    if measured is None:
        return most, "a fair share of the cores; a step takes too long to be measured"
    best = 1
    for threads in sorted(measured)[1:]:
        if not _pays(measured, best, threads):
            break
        best = threads
    times = ", ".join(f"{1000 * seconds:.2g} ms on {threads}" for threads, seconds in sorted(measured.items()))
    return best, f"measured: a micro batch takes {times}"


def _measured(rehearse: Callable[[], Callable[[], None]], most: int) -> dict[int, float] | None:
    """Seconds of a step by the number of threads: 1, 2, 4 … as long as it pays off. None where it takes long."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a fork beside other threads: the child is killed if it should hang
        child = os.fork()
    if child == 0:
        try:
            nothing = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(nothing, fd)
            _climb(rehearse(), most, writer)
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
    found = dict(json.loads(line) for line in answer.splitlines() if line.endswith(b"]"))
    return found if found and found[1] <= _LONG else None


def _climb(step: Callable[[], None], most: int, writer: int) -> None:
    """Write down what a step takes on 1, 2, 4 … threads, as long as it pays off."""
    times: dict[int, float] = {}
    before, threads = 1, 1
    while True:
        times[threads] = _fastest(step, threads)
        os.write(writer, json.dumps([threads, times[threads]]).encode() + b"\n")
        is_enough = threads == most or times[1] > _LONG
        if is_enough or (threads > 1 and not _pays(times, before, threads)):
            return
        before, threads = threads, min(2 * threads, most)


def _pays(times: dict[int, float], few: int, many: int) -> bool:
    return times[few] / times[many] >= 1 + _GAIN * (many / few - 1)


def _fastest(step: Callable[[], None], threads: int) -> float:
    """Seconds of the fastest of some steps: other work beside it makes steps slower, never faster."""
    torch.set_num_threads(threads)
    step()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < _ENOUGH and len(times) < _AT_MOST):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return min(times)

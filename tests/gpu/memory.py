"""What a killed run held of the device is free again, and its processes are gone."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import psutil
import torch

from tests.gpu.harness import FAILED, OK, UNCHECKED, Case, Row, Scale, exact_flags, mebibytes, passing, train_forked
from train.run import states
from train.run.run_folder import Run

PATIENCE = 40.0
_WITHIN = 64 * 2**20
"""Bytes that other users of the device may have taken or given back meanwhile."""


def part(scale: Scale) -> Iterator[Case]:
    """What is left of a run that was killed."""
    yield Case("SIGKILL", 17, _killed, (scale,))


def _killed(scale: Scale) -> Iterator[Row]:
    """Kill a run with loader processes while it trains."""
    with passing(scale, "digits", exact_flags(scale, "digits") | {"steps": 2}) as first:
        train_forked(first)  # starts the server
    before = _free(scale)
    flags = exact_flags(scale, "gpt") | {"steps": 1_000_000, "data.workers": 2}
    del flags["checkpoint.every_steps"]
    seen: dict[str, float] = {}
    with passing(scale, "gpt", flags) as run:
        killer = threading.Thread(target=_kill, args=(scale, run, before, seen))
        killer.start()
        train_forked(run)
        killer.join()
    if "killed" not in seen:
        yield Row("SIGKILL", "the run never trained", FAILED)
        return
    waited, left = _until_free(scale, before, seen["killed"])
    yield Row("processes gone after SIGKILL", "all" if not left else f"{left} are left", FAILED if left else OK, "all")
    what = "memory of the device freed after SIGKILL"
    if not scale.is_gpu:
        yield Row(what, "a CPU has none of its own", UNCHECKED)
        return
    missing = before - _free(scale)
    found = (
        f"{mebibytes(seen['used'])} in {waited:.1f} s" if missing <= _WITHIN else f"{mebibytes(missing)} are missing"
    )
    yield Row(what, found, OK if missing <= _WITHIN else FAILED, "all of it", {"seconds": waited, "used": seen["used"]})


def _free(scale: Scale) -> int:
    return torch.cuda.mem_get_info()[0] if scale.is_gpu else 0


def _kill(scale: Scale, run: Run, before: int, seen: dict[str, float]) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        time.sleep(0.1)
        record = run.read()
        rank = next(iter(record["pids"].get("ranks", ())), os.getpid())
        if record.get("step", 0) < 20 or rank == os.getpid():  # who starts ranks stands there until theirs are noted
            continue
        seen["used"] = before - _free(scale)
        _family[:] = [process.pid for process in psutil.Process(rank).children(recursive=True)] + [rank]
        os.kill(rank, signal.SIGKILL)
        seen["killed"] = time.monotonic()
        return
    run.ask_stop(states.NOW)


_family: list[int] = []


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # of which nothing is left but its name
    except psutil.NoSuchProcess:
        return False


def _until_free(scale: Scale, before: int, killed: float) -> tuple[float, int]:
    """Seconds from the kill until the memory was free, and the number of processes that are left."""
    deadline = time.monotonic() + 20
    while True:
        left = sum(map(_lives, _family))
        if (not left and before - _free(scale) <= _WITHIN) or time.monotonic() > deadline:
            return time.monotonic() - killed, left
        time.sleep(0.05)

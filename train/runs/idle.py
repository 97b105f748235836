"""Finding out that a script hangs: for long no output, and no use of the CPU by any process of any rank.

A script shows no sign of life of its own. What waits on a GPU or in a collective of NCCL uses the CPU, so this finds
less than the watch of tasks does; it never ends a script that computes. Used by the agent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

MINUTES = 30.0
"""How long a script may show no sign of life, unless watch.hang_minutes says otherwise."""
_LOOK_EVERY = 2.0
_SHARE = 0.01
"""Of one CPU: threads that only wait (progress bars, watchdogs, a store's keep-alive) use less."""


class Idle:
    """The signs of life of one attempt of a script.

    Args:
        logs: where the ranks' output goes.
        minutes: without any sign before it counts as a hang; 0: never.
    """

    def __init__(self, logs: Path, minutes: float) -> None:
        self._logs, self._allowed = logs, 60 * minutes
        self._at = self._looked = time.monotonic()
        self._output: tuple[tuple[str, int], ...] = ()
        self._used: dict[tuple[int, float], float] = {}

    def hangs(self, ranks: list[int]) -> str | None:
        """What hangs, as a reason, or None.

        Args:
            ranks: process ids.
        """
        now = time.monotonic()
        if not self._allowed or now - self._looked < min(_LOOK_EVERY, self._allowed / 4):
            return None
        self._looked = now
        output, used = self._written(), _cpu_seconds(ranks)
        spent = sum(max(seconds - self._used.get(key, 0.0), 0.0) for key, seconds in used.items())
        if not self._used or output != self._output or spent > _SHARE * (now - self._at) + 0.05:
            self._output, self._used, self._at = output, used, now
            return None
        silent = now - self._at
        if silent <= self._allowed:
            return None
        stacks = f"{self._logs.name}/rank*.stack.txt"
        return f"no output and no use of the CPU for {silent:.0f} s; stacks of the ranks: {stacks}"

    def _written(self) -> tuple[tuple[str, int], ...]:
        with contextlib.suppress(OSError):
            return tuple(sorted((path.name, path.stat().st_size) for path in self._logs.glob("rank*.log")))
        return ()


def family(pids: Iterable[int]) -> list[psutil.Process]:
    """These processes and all that they have started, as far as they live."""
    found: dict[int, psutil.Process] = {}
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            found[pid] = process
            found.update({child.pid: child for child in process.children(recursive=True)})
    return list(found.values())


def _cpu_seconds(pids: list[int]) -> dict[tuple[int, float], float]:
    seconds = {}
    for process in family(pids):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            seconds[process.pid, process.create_time()] = (
                times.user + times.system + times.children_user + times.children_system
            )
    return seconds


def seats(pids: list[int]) -> dict[int, int]:
    """The rank of each of these processes, by what torchrun has told it."""
    ranks = {}
    for pid in pids:
        with contextlib.suppress(psutil.Error, KeyError, ValueError):
            ranks[int(psutil.Process(pid).environ()["RANK"])] = pid
    return ranks


def end(pids: list[int]) -> None:
    """Kill these processes and all that they have started: one that is left would hold the run's lock."""
    for process in family(pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)

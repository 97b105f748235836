"""Finding out that ranks hang or have died, and what they were doing. Used by the agent."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from train.record import heartbeat
from train.record.heartbeat import Beat

LEAST_MINUTES = 5.0
"""A step may always take so long. Beyond it, a run's own experience decides."""
TIMES_SLOWEST = 20
"""A step that takes so many times the slowest one before it is a hang."""
_STOOD_STILL = 10.0
"""Seconds without a look after which this process stood still, and the ranks with it: a container that is paused,
a machine that sleeps. They have no silence to explain."""
_PATIENCE = 20.0
"""Seconds that py-spy has for a process."""


class Watch:
    """The signs of life of one attempt's ranks.

    `hang_minutes` is how long ranks may show none between two steps: None takes the larger of LEAST_MINUTES and
    TIMES_SLOWEST times the slowest gap seen in this attempt; 0 never finds a hang. Starting, with its first step and
    compilation, and saving have an allowance of their own, `start_minutes`.
    """

    def __init__(self, logs: Path, ranks: Iterable[int], hang_minutes: float | None, start_minutes: float) -> None:
        self._logs, self._ranks = logs, tuple(ranks)
        self._hang, self._start = hang_minutes, start_minutes
        self._seen: tuple[Beat | None, ...] = ()
        self._at = self._looked = time.monotonic()
        self._slowest = 0.0
        self._stacks: dict[int, Stack] | None = None
        """Of the ranks, those that are not written yet; None: nobody has asked for them."""
        self._asked_until = 0.0

    def beats(self) -> tuple[Beat | None, ...]:
        """The last sign of life of every rank."""
        return tuple(heartbeat.read(self._logs / f"rank{rank}.beat") for rank in self._ranks)

    def hangs(self) -> str | None:
        """What hangs, as a reason, or None."""
        beats, now = self.beats(), time.monotonic()
        if now - self._looked > _STOOD_STILL:
            self._at = now
        self._looked = now
        silent = now - self._at
        if beats != self._seen:
            if self._is_routine(self._seen) and self._is_routine(beats):
                self._slowest = max(self._slowest, silent)
            self._seen, self._at = beats, now
            return None
        allowed = 60 * self._allowed(beats)
        if not allowed or silent <= allowed:
            return None
        if not self._can_write():  # nor can the ranks: that is no sign of a hang, and they may train on
            self._at = now
            return None
        behind = min((beat for beat in beats if beat), key=lambda beat: (beat.step, beat.count), default=None)
        doing = f" {heartbeat.NAMES[behind.phase]} after step {behind.step}" if behind else " starting"
        return f"no progress for {silent:.0f} s while{doing}; stacks of the ranks: {self._logs.name}/rank*.stack.txt"

    def _can_write(self) -> bool:
        probe = self._logs / ".probe"
        try:
            probe.write_bytes(b"1")
            probe.unlink()
        except OSError:
            return False
        return True

    def _is_routine(self, beats: tuple[Beat | None, ...]) -> bool:
        return bool(beats) and all(b and b.phase in (heartbeat.TRAINING, heartbeat.EVALUATING) for b in beats)

    def _allowed(self, beats: tuple[Beat | None, ...]) -> float:
        if self._hang == 0:
            return 0.0
        if not self._is_routine(beats):
            return self._start
        if self._hang is not None:
            return self._hang
        return max(LEAST_MINUTES, TIMES_SLOWEST * self._slowest / 60)

    def dead(self, started: list[int]) -> bool:
        """Whether a rank is gone that was not ending: of those that have shown a sign of life, or of `started`."""
        beats = [beat for beat in self.beats() if beat and beat.pid]
        silent = set(started) - {beat.pid for beat in beats}  # still importing
        mortal = silent | {beat.pid for beat in beats if beat.phase != heartbeat.ENDING}
        return not all(map(lives, mortal))

    def dump(self, living: Iterable[int]) -> bool:
        """Write down what every rank is doing: py-spy where it is there and allowed, faulthandler otherwise.

        It takes a while, and an agent that says nothing meanwhile is taken for gone. Returns whether it is done; to be
        called until then.

        Args:
            living: ids of the ranks that live. Another's process is not looked into, nor ended by SIGQUIT.
        """
        if self._stacks is None:
            beats = zip(self._ranks, self.beats(), strict=True)
            lives = {rank: beat.pid for rank, beat in beats if beat and beat.pid in living}
            self._stacks = {rank: Stack(pid, self._logs / f"rank{rank}.stack.txt") for rank, pid in lives.items()}
        for rank, stack in list(self._stacks.items()):
            is_there = stack.is_there()
            if is_there is None:
                continue
            del self._stacks[rank]
            if not is_there and stack.pid in living:
                self._ask(rank, stack.pid)
        return not self._stacks and time.monotonic() > self._asked_until

    def _ask(self, rank: int, pid: int) -> None:
        """Let a rank write down itself what it is doing."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGQUIT)  # its handler appends to the same file: see runs/worker.py
        # NCCL's flight recorder writes its trace when something is written into this pipe
        pipe = self._logs / f"nccl-rank{rank}.pipe"
        with contextlib.suppress(OSError):
            fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            os.write(fd, b"1\n")
            os.close(fd)
        self._asked_until = time.monotonic() + 1.0  # handlers write while they still can


class Stack:
    """What a process is doing, on its way into a file: py-spy writes it."""

    def __init__(self, pid: int, target: Path) -> None:
        self.pid, self._target, self._until = pid, target, time.monotonic() + _PATIENCE
        self._said = os.fdopen(os.memfd_create("stack"), "w+b")
        self._spy: subprocess.Popen[bytes] | None = None
        spy = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
        if spy is not None:
            command, null = [spy, "dump", "--pid", str(pid)], subprocess.DEVNULL
            with contextlib.suppress(OSError):
                self._spy = subprocess.Popen(command, stdin=null, stdout=self._said, stderr=null)

    def is_there(self) -> bool | None:
        """Whether it is written. False: py-spy is not there, not allowed, or too slow. None: not yet."""
        if self._spy is not None and self._spy.poll() is None:
            if time.monotonic() < self._until:
                return None
            self._spy.kill()
            self._spy.wait()
        with self._said, contextlib.suppress(OSError):
            self._said.seek(0)
            if self._spy is not None and self._spy.returncode == 0:
                self._target.write_bytes(self._said.read())
                return True
        return False


def stack_of(pid: int, target: Path) -> bool:
    """Write what a process is doing into a file, by py-spy. False where that is not there or not allowed."""
    stack = Stack(pid, target)
    while (is_there := stack.is_there()) is None:
        time.sleep(0.05)
    return is_there


def lives(pid: int) -> bool:
    """Whether this process has not ended, reaped or not."""
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False

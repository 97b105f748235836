"""The health of living ranks: one that hangs is found and explained, and the peers of a dead one are ended.

A task's ranks show signs of life of their own. A script shows none, so it hangs where, for long, it neither writes nor
uses the CPU; what waits on a GPU or in a collective of NCCL uses the CPU, so this finds less.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import psutil

from train.run import heartbeat
from train.run.heartbeat import Beat
from train.run.run_folder import Run
from train.supervise.timeouts import (
    GRACE_AFTER_EXIT,
    GRACE_AFTER_FAILURE,
    GRACE_AFTER_SIGNAL,
    HANG_LEAST_MINUTES,
    HANG_TIMES_SLOWEST,
    SCRIPT_GRACE,
    SCRIPT_HANG_MINUTES,
    STOP_TIMES_SLOWEST,
    STOP_WAIT,
)

Kill = Callable[[int, int], None]
"""Sends a signal to a process."""
_WRITING = 1.0
"""Seconds in which ranks that hang write down what they are doing."""
_STOOD_STILL = 10.0
"""Seconds without a look after which this process stood still, and the ranks with it: a container that is paused,
a machine that sleeps. They have no silence to explain."""
_SPYING = 20.0
"""Seconds that py-spy has for the ranks of a script."""
_LOOK_EVERY = 2.0
_SHARE = 0.01
"""Of one CPU: threads that only wait (progress bars, watchdogs, a store's keep-alive) use less."""


def health_of(run: Run, attempt: int, ranks: Iterable[int], kill: Kill) -> Health:
    """What looks after the ranks of this attempt."""
    record = run.read()
    if not record.get("script"):
        return TaskHealth(run, run.logs(attempt), ranks, kill)
    minutes = (record.get("watch") or {}).get("hang_minutes")
    return ScriptHealth(run.logs(attempt), SCRIPT_HANG_MINUTES if minutes is None else float(minutes), kill)


class Health:
    """What ends ranks that hang, and peers of one that is gone.

    Args:
        logs: where the ranks' output goes.
    """

    def __init__(self, logs: Path, kill: Kill) -> None:
        self.hang = ""
        """That they hung, and how."""
        self._logs, self._kill = logs, kill
        self._at = self._looked = time.monotonic()
        self._end_at: float | None = None
        """When those that still live are killed; None: they are not."""

    def look(self, living: list[int], started: list[int], exits: Mapping[int, int], is_stopping: bool) -> None:
        """To be called several times a second. The first two are process ids, of all by rank."""
        raise NotImplementedError

    @property
    def is_ending(self) -> bool:
        return self._end_at is not None

    def end(self) -> None:
        """The ranks of another machine are dead: end these, as if it were one of theirs."""
        self._end_in(GRACE_AFTER_FAILURE)

    def _end_in(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        self._end_at = at if self._end_at is None else min(self._end_at, at)

    def _kill_if_due(self, living: list[int]) -> None:
        if self._end_at is not None and time.monotonic() > self._end_at:
            self._kill_all(living)

    def _kill_all(self, living: list[int]) -> None:
        for pid in living:
            self._kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Remove stacks that nothing was written into."""
        for path in self._logs.glob("*.stack.txt"):
            with contextlib.suppress(OSError):
                if not path.stat().st_size:
                    path.unlink()


class TaskHealth(Health):
    """Ends ranks that show no sign of life, and peers of one that is gone.

    `watch.hang_minutes` is how long ranks may show none between two steps: None takes the larger of HANG_LEAST_MINUTES
    and HANG_TIMES_SLOWEST times the slowest gap seen in this attempt; 0 never finds a hang. Starting, with its first
    step and compilation, and saving have an allowance of their own, `watch.start_minutes`. Ranks that were asked to
    stop have less time (STOP_WAIT), whatever that says: a stop must not wait for a batch, or a peer, that never comes.
    """

    def __init__(self, run: Run, logs: Path, ranks: Iterable[int], kill: Kill = os.kill) -> None:
        super().__init__(logs, kill)
        self._ranks = tuple(ranks)
        config = run.read_config()
        self._hang_minutes: float | None = config.get("watch.hang_minutes")
        self._start_minutes = float(config.get("watch.start_minutes", 30.0))
        self._seen: tuple[Beat | None, ...] = ()
        self._slowest = 0.0
        self._asked_at: float | None = None
        """When the ranks were asked to stop."""

    def look(self, living: list[int], started: list[int], exits: Mapping[int, int], is_stopping: bool) -> None:
        if not living:
            return
        beats = tuple(heartbeat.read(self._logs / f"rank{rank}.beat") for rank in self._ranks)
        gone = [beat for pid, beat in zip(started, beats, strict=False) if pid not in living]
        # by SIGABRT ranks end themselves, as NCCL's watchdog does, and may not have been the first
        if any(code < 0 and code != -signal.SIGABRT for code in exits.values()):
            self._end_in(GRACE_AFTER_SIGNAL)
        elif any(beat is None or beat.phase != heartbeat.ENDING for beat in gone):
            self._end_in(GRACE_AFTER_FAILURE)
        elif exits:
            self._end_in(GRACE_AFTER_EXIT)
        elif not self.is_ending and (hang := self._hangs(beats, is_stopping)):
            self.hang = hang
            self._ask_for_stacks(living)
            self._end_in(_WRITING)
        # torchrun alone would give peers that wait for the dead 30 seconds
        self._kill_if_due(living)

    def _hangs(self, beats: tuple[Beat | None, ...], is_stopping: bool) -> str:
        """What hangs, as a reason; '' if nothing."""
        now = time.monotonic()
        if now - self._looked > _STOOD_STILL:
            self._at = now
        self._looked = now
        silent = now - self._at
        if beats != self._seen:
            if _is_routine(self._seen) and _is_routine(beats):
                self._slowest = max(self._slowest, silent)
            self._seen, self._at = beats, now
            return ""
        if is_stopping and self._asked_at is None:
            self._asked_at = now
        if self._asked_at is not None:
            silent, allowed = now - max(self._at, self._asked_at), self._allowed_to_stop(beats)
        else:
            allowed = 60 * self._allowed(beats)
        if not allowed or silent <= allowed:
            return ""
        if not self._can_write():  # nor can the ranks: that is no sign of a hang, and they may train on
            self._at = now
            return ""
        behind = min((beat for beat in beats if beat), key=lambda beat: (beat.step, beat.count), default=None)
        doing = f" {heartbeat.NAMES[behind.phase]} after step {behind.step}" if behind else " starting"
        since = "" if self._asked_at is None else " since it was asked to stop,"
        stacks = f"stacks of the ranks: {self._logs.name}/rank*.stack.txt"
        return f"no progress for {silent:.0f} s{since} while{doing}; {stacks}"

    def _can_write(self) -> bool:
        probe = self._logs / ".probe"
        try:
            probe.write_bytes(b"1")
            probe.unlink()
        except OSError:
            return False
        return True

    def _allowed(self, beats: tuple[Beat | None, ...]) -> float:
        if self._hang_minutes == 0 or all(b and b.phase == heartbeat.COMPUTING_METRICS for b in beats):
            return 0.0
        if not _is_routine(beats):
            return self._start_minutes
        if self._hang_minutes is not None:
            return self._hang_minutes
        return max(HANG_LEAST_MINUTES, HANG_TIMES_SLOWEST * self._slowest / 60)

    def _allowed_to_stop(self, beats: tuple[Beat | None, ...]) -> float:
        """Seconds without a sign of life for ranks that were asked to stop."""
        if any(beat and beat.phase in (heartbeat.SAVING, heartbeat.COMPUTING_METRICS) for beat in beats):
            return 60 * self._start_minutes
        return max(STOP_WAIT, STOP_TIMES_SLOWEST * self._slowest)

    def _ask_for_stacks(self, living: list[int]) -> None:
        """Let ranks write down what they are doing: by faulthandler (worker.py), and by NCCL's flight recorder."""
        for pid in living:
            self._kill(pid, signal.SIGQUIT)
        for rank in self._ranks:  # the recorder writes its trace when something is written into this pipe
            with contextlib.suppress(OSError):
                fd = os.open(self._logs / f"nccl-rank{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
                os.write(fd, b"1\n")
                os.close(fd)


def _is_routine(beats: tuple[Beat | None, ...]) -> bool:
    return bool(beats) and all(b and b.phase in (heartbeat.TRAINING, heartbeat.EVALUATING) for b in beats)


class ScriptHealth(Health):
    """Ends a script that neither writes nor computes, and writes down what it was doing.

    Args:
        minutes: without any sign of life before it counts as a hang; 0: never.
    """

    def __init__(self, logs: Path, minutes: float, kill: Kill = os.kill) -> None:
        super().__init__(logs, kill)
        self._allowed = 60 * minutes
        self._output: tuple[tuple[str, int], ...] = ()
        self._used: dict[tuple[int, float], float] = {}

    def look(self, living: list[int], started: list[int], exits: Mapping[int, int], is_stopping: bool) -> None:
        heartbeat.sign(self._logs)
        if exits and living and not self.is_ending:  # as torchrun does
            for pid in living:
                self._kill(pid, signal.SIGTERM)
            self._end_in(SCRIPT_GRACE)
        may_hang = living and not (self.hang or is_stopping)  # one that was asked to stop may take its time
        if may_hang and (hang := self._hangs(living)):
            self.hang = hang
            self._write_stacks({rank: pid for rank, pid in enumerate(started) if pid in living})
            self._end_in(0)
        self._kill_if_due(living)

    def _kill_all(self, living: list[int]) -> None:
        """Kill also all that these ranks have started: one that is left would hold the run's lock."""
        for process in family(living):
            with contextlib.suppress(psutil.Error):
                if process.pid not in living:
                    process.kill()
        super()._kill_all(living)

    def _hangs(self, ranks: list[int]) -> str:
        """What hangs, as a reason; '' if nothing.

        Args:
            ranks: process ids.
        """
        now = time.monotonic()
        if not self._allowed or now - self._looked < min(_LOOK_EVERY, self._allowed / 4):
            return ""
        self._looked = now
        output, used = self._written(), _cpu_seconds(ranks)
        spent = sum(max(seconds - self._used.get(key, 0.0), 0.0) for key, seconds in used.items())
        if not self._used or output != self._output or spent > _SHARE * (now - self._at) + 0.05:
            self._output, self._used, self._at = output, used, now
            return ""
        silent = now - self._at
        if silent <= self._allowed:
            return ""
        stacks = f"{self._logs.name}/rank*.stack.txt"
        return f"no output and no use of the CPU for {silent:.0f} s; stacks of the ranks: {stacks}"

    def _written(self) -> tuple[tuple[str, int], ...]:
        with contextlib.suppress(OSError):
            return tuple(sorted((path.name, path.stat().st_size) for path in self._logs.glob("rank*.log")))
        return ()

    def _write_stacks(self, pids: Mapping[int, int]) -> None:
        """Write what each of these ranks is doing into a file, by py-spy where it is there and allowed."""
        spy = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
        spies, null = [], subprocess.DEVNULL
        for rank, pid in pids.items():
            with contextlib.suppress(OSError), (self._logs / f"rank{rank}.stack.txt").open("wb") as file:
                command = [spy or "py-spy", "dump", "--pid", str(pid)]
                spies.append(subprocess.Popen(command, stdin=null, stdout=file, stderr=null))
        until = time.monotonic() + _SPYING
        for process in spies:
            try:
                process.wait(max(until - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


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

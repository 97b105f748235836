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
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import psutil

from train.run import heartbeat
from train.run.heartbeat import Beat
from train.run.run_folder import Run

Kill = Callable[[int, int], None]
"""Sends a signal to a process."""
_KILLED = 0.2
"""Seconds that its peers live on where a signal has ended a rank: all that they could say is that it is gone."""
_GRACE = 3.0
"""The same where it has failed: they may be about to say why."""
_ENDING = 10.0
"""The same where it has ended by itself, for example before it had met the others, who still wait for it."""
_SCRIPT_GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL for the peers of a script's rank that has failed."""
LEAST_MINUTES = 5.0
"""A step may always take so long. Beyond it, a run's own experience decides."""
TIMES_SLOWEST = 20
"""A step that takes so many times the slowest one before it is a hang."""
_STOOD_STILL = 10.0
"""Seconds without a look after which this process stood still, and the ranks with it: a container that is paused,
a machine that sleeps. They have no silence to explain."""
_PATIENCE = 20.0
"""Seconds that py-spy has for a process."""
SCRIPT_MINUTES = 30.0
"""How long a script may show no sign of life, unless watch.hang_minutes says otherwise."""
_LOOK_EVERY = 2.0
_SHARE = 0.01
"""Of one CPU: threads that only wait (progress bars, watchdogs, a store's keep-alive) use less."""


def of(run: Run, attempt: int, ranks: Iterable[int], kill: Kill) -> TaskHealth | ScriptHealth:
    """What looks after the ranks of this attempt."""
    record = run.read()
    if not record.get("script"):
        return TaskHealth(run, run.logs(attempt), ranks, kill)
    minutes = (record.get("watch") or {}).get("hang_minutes")
    return ScriptHealth(run.logs(attempt), SCRIPT_MINUTES if minutes is None else float(minutes), kill)


class TaskHealth:
    """Ends ranks that show no sign of life, and peers of one that is gone."""

    def __init__(self, run: Run, logs: Path, ranks: Iterable[int], kill: Kill = os.kill) -> None:
        self.hang = ""
        self._kill, self._logs = kill, logs
        limits = tomllib.loads((run.folder / "config.toml").read_text(encoding="utf-8")).get("watch", {})
        start = float(limits.get("start_minutes", 30.0))
        self._watch = HangDetector(logs, ranks, limits.get("hang_minutes"), start)
        self._dead_since: float | None = None
        self._patience = _GRACE

    def look(self, living: list[int], started: list[int], exits: Mapping[int, int], is_stopping: bool) -> None:
        if not living:
            return
        if self._dead_since is None and self._watch.dead(started):
            self._note_death(_GRACE)
        elif exits:
            self._note_death(_ENDING)
        if _were_killed(exits):
            self._patience = _KILLED
        self.hang = self.hang or self._watch.hangs() or ""
        is_written = not self.hang or self._watch.dump(living)
        if self.hang and self._dead_since is None and is_written:
            self._dead_since = 0.0
        # torchrun alone would give peers that wait for the dead 30 seconds
        if self._dead_since is not None and is_written and time.monotonic() - self._dead_since > self._patience:
            for pid in living:
                self._kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """The ranks of another machine are dead: end these, as if it were one of theirs."""
        self._note_death(_GRACE)

    def _note_death(self, patience: float) -> None:
        if self._dead_since is None:
            self._dead_since, self._patience = time.monotonic(), patience

    @property
    def is_ending(self) -> bool:
        return self._dead_since is not None

    def close(self) -> None:
        for path in self._logs.glob("*.stack.txt"):
            with contextlib.suppress(OSError):
                if not path.stat().st_size:
                    path.unlink()


def _were_killed(exits: Mapping[int, int]) -> bool:
    """Whether a rank was ended by a signal from elsewhere. By SIGABRT ranks end themselves, as NCCL's watchdog does,
    and may not have been the first."""
    return any(code < 0 and code != -signal.SIGABRT for code in exits.values())


class ScriptHealth:
    """Ends a script that neither speaks nor computes, and writes down what it was doing."""

    def __init__(self, logs: Path, minutes: float, kill: Kill = os.kill) -> None:
        self.hang = ""
        self._kill, self._logs, self._detector = kill, logs, ScriptHangDetector(logs, minutes)
        self._asked_at: float | None = None

    def look(self, living: list[int], started: list[int], exits: Mapping[int, int], is_stopping: bool) -> None:
        heartbeat.sign(self._logs)
        if exits and living:
            self._end_peers(living)
        if self.hang or is_stopping or not living:  # one that was asked to stop may take its time
            return
        self.hang = self._detector.hangs(living) or ""
        if self.hang:
            for rank, pid in by_rank(living).items():
                stack_of(pid, self._logs / f"rank{rank}.stack.txt")
            end(living)

    def _end_peers(self, living: list[int]) -> None:
        """Ask the peers of a rank that has failed to end, as torchrun does; kill those that do not."""
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            for pid in living:
                self._kill(pid, signal.SIGTERM)
        elif time.monotonic() - self._asked_at > _SCRIPT_GRACE:
            end(living)

    is_ending = False

    def end(self) -> None:
        """Only a task's ranks are on several machines."""

    def close(self) -> None:
        """Its stacks stay."""


class HangDetector:
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
            os.kill(pid, signal.SIGQUIT)  # its handler appends to the same file: see worker.py
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
        self._output = os.fdopen(os.memfd_create("stack"), "w+b")
        self._spy: subprocess.Popen[bytes] | None = None
        spy = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
        if spy is not None:
            command, null = [spy, "dump", "--pid", str(pid)], subprocess.DEVNULL
            with contextlib.suppress(OSError):
                self._spy = subprocess.Popen(command, stdin=null, stdout=self._output, stderr=null)

    def is_there(self) -> bool | None:
        """Whether it is written. False: py-spy is not there, not allowed, or too slow. None: not yet."""
        if self._spy is not None and self._spy.poll() is None:
            if time.monotonic() < self._until:
                return None
            self._spy.kill()
            self._spy.wait()
        with self._output, contextlib.suppress(OSError):
            self._output.seek(0)
            if self._spy is not None and self._spy.returncode == 0:
                self._target.write_bytes(self._output.read())
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
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


class ScriptHangDetector:
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


def by_rank(pids: list[int]) -> dict[int, int]:
    """The rank of each of these processes, by its environment from torchrun."""
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

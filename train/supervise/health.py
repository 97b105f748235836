"""Watches running ranks: finds and explains a hang, and ends the other ranks after one has died.

Ranks of a task and of a script with a session give signs of life. Another script gives none, so it counts as hanging if
for a long time it writes neither output nor figures, and does not use the CPU. That finds fewer hangs: a rank that
waits for a GPU or in an NCCL collective uses the CPU.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import psutil

from ..errors import one_line
from ..run import heartbeat
from ..run.heartbeat import Beat
from . import last_words
from .lingering import Lingering, spy
from .script_figures import ScriptFigures
from .timeouts import (
    GRACE_AFTER_EXIT,
    GRACE_AFTER_FAILURE,
    GRACE_AFTER_SIGNAL,
    HANG_LEAST_MINUTES,
    HANG_TIMES_SLOWEST,
    SCRIPT_GRACE,
    SCRIPT_HANG_MINUTES,
    SCRIPT_PRINTS,
    SCRIPT_PRINTS_FIRST,
    STOP_TIMES_SLOWEST,
    STOP_WAIT,
)

Kill = Callable[[int, int], None]
"""Sends a signal to a process."""
_PATIENT = (heartbeat.SAVING, *heartbeat.OF_THE_TASK, heartbeat.COMPILING)
"""Phases that a stop does not interrupt: ranks get `watch.start_minutes` for them."""
_WRITING = 1.0
"""Seconds that hanging ranks get to write their stacks."""
_STOOD_STILL = 10.0
"""Seconds without a look after which this process itself was suspended together with the ranks, by a paused container
or a sleeping machine. Such silence is not a hang."""
_SPYING = 20.0
"""Seconds py-spy gets to write the stacks of a script's ranks."""
_MAY_SPY = "to allow it, as root on the host: sysctl kernel.yama.ptrace_scope=0; in a container: --cap-add SYS_PTRACE"
"""How py-spy gets to read another process."""
_LOOK_EVERY = 2.0
_SHARE = 0.01
"""Share of one CPU. Threads that only wait (progress bars, watchdogs, a store's keep-alive) use less."""


class Health:
    """Ends ranks that hang, and the other ranks after one has died.

    Args:
        logs: Folder of the ranks' logs.
    """

    def __init__(self, logs: Path, kill: Kill) -> None:
        self.hang = ""
        """Description of a hang; '': none."""
        self._logs, self._kill = logs, kill
        self._at = self._looked = time.monotonic()
        self._end_at: float | None = None
        """When to kill the ranks that still run; None: not planned."""

    def look(self, living: list[int], started: list[int], exits: Mapping[int, int], is_stopping: bool) -> None:
        """Check the ranks; call this several times per second.

        Args:
            living: Process ids of the running ranks.
            started: Process ids of all ranks, by rank.
        """
        raise NotImplementedError

    @property
    def is_ending(self) -> bool:
        return self._end_at is not None

    def end(self) -> None:
        """End these ranks, because a rank on another machine has died."""
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
        """Remove empty stack files."""
        for path in self._logs.glob("*.stack.txt"):
            with contextlib.suppress(OSError):
                if not path.stat().st_size:
                    path.unlink()


class TaskHealth(Health):
    """Ends ranks that give no sign of life, and the other ranks after one has died.

    `watch.hang_minutes` limits the time without a sign of life between two steps. None means the larger of
    HANG_LEAST_MINUTES and HANG_TIMES_SLOWEST times the slowest gap in this attempt; 0 never finds a hang. The limit is
    `watch.start_minutes` while a rank starts (with the first step), compiles or saves. Ranks that were asked to stop
    get less time (STOP_WAIT): a stop must not wait for a batch, or a rank, that never comes.
    """

    _routine: ClassVar[tuple[int, ...]] = (heartbeat.TRAINING, heartbeat.EVALUATING)
    """Phases whose signs of life come at short intervals."""

    def __init__(self, config: Mapping[str, Any], logs: Path, ranks: Iterable[int], kill: Kill = os.kill) -> None:
        super().__init__(logs, kill)
        self._ranks = tuple(ranks)
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
        if grace := _grace_after(gone, exits):
            self._end_in(grace)
        elif not self.is_ending and (hang := self._hangs(beats, is_stopping)):
            self.hang = hang
            self._ask_for_stacks(living)
            self._end_in(_WRITING)
        # torchrun would give ranks that wait for a dead one 30 seconds
        self._kill_if_due(living)

    def _hangs(self, beats: tuple[Beat | None, ...], is_stopping: bool) -> str:
        """Return the description of a hang; '' if there is none."""
        now = time.monotonic()
        if now - self._looked > _STOOD_STILL:
            self._at = now
        self._looked = now
        silent = now - self._at
        if beats != self._seen:
            if self._is_routine(self._seen) and self._is_routine(beats):
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
        if not self._can_write():  # nor can the ranks, so silence does not mean a hang: they may still train
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
        if self._hang_minutes == 0 or all(b and b.phase in heartbeat.OF_THE_TASK for b in beats):
            return 0.0
        if not self._is_routine(beats):
            return self._start_minutes
        if self._hang_minutes is not None:
            return self._hang_minutes
        return max(HANG_LEAST_MINUTES, HANG_TIMES_SLOWEST * self._slowest / 60)

    def _is_routine(self, beats: tuple[Beat | None, ...]) -> bool:
        return bool(beats) and all(beat and beat.phase in self._routine for beat in beats)

    def _allowed_to_stop(self, beats: tuple[Beat | None, ...]) -> float:
        """Return the seconds that ranks that were asked to stop may take without a sign of life."""
        if any(beat and beat.phase in _PATIENT for beat in beats):
            return 60 * self._start_minutes
        return max(STOP_WAIT, STOP_TIMES_SLOWEST * self._slowest)

    def _ask_for_stacks(self, living: list[int]) -> None:
        """Make ranks write their stacks by faulthandler (worker.py), and NCCL's flight recorder its trace."""
        for pid in living:
            self._kill(pid, signal.SIGQUIT)
        for rank in self._ranks:  # writing into this pipe triggers the recorder
            with contextlib.suppress(OSError):
                fd = os.open(self._logs / f"nccl-rank{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
                os.write(fd, b"1\n")
                os.close(fd)


def _grace_after(gone: Iterable[Beat | None], exits: Mapping[int, int]) -> float:
    """Return the seconds that the other ranks get after some are gone; 0: they may continue."""
    # ranks end themselves by SIGABRT, as NCCL's watchdog does, so such a rank may not be the first one
    if any(code < 0 and code != -signal.SIGABRT for code in exits.values()):
        return GRACE_AFTER_SIGNAL
    if any(beat is None or beat.phase != heartbeat.ENDING for beat in gone):
        return GRACE_AFTER_FAILURE
    return GRACE_AFTER_EXIT if exits else 0.0


def _is_over(beat: Beat) -> bool:
    return beat.phase == heartbeat.ENDING


class ScriptHealth(TaskHealth):
    """Ends a script that shows no life, and writes its stacks.

    While all its ranks train in a session, their steps are the signs of life. Otherwise it is hanging when nothing
    writes output or figures, or uses the CPU: the work between two steps (an evaluation, say) may take any time.

    Args:
        figures: What follows the script's figures.
        watch: The run's `watch.*` fields, by their names without the prefix.
        tell: Shows a line to the user.
    """

    _routine: ClassVar = (heartbeat.TRAINING,)

    def __init__(
        self, figures: ScriptFigures, logs: Path, watch: Mapping[str, Any], ranks: Iterable[int], kill: Kill = os.kill,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:  # fmt: skip
        minutes = watch.get("hang_minutes")
        super().__init__({"watch.hang_minutes": minutes}, logs, ranks, kill)
        self._figures, self._silent_for = figures, 60 * (SCRIPT_HANG_MINUTES if minutes is None else float(minutes))
        self._failed_at, self._lingering = 0.0, Lingering(tell)
        self._output: tuple[tuple[str, int], ...] = ()
        self._used: dict[tuple[int, float], float] = {}
        self._quiet_since = self._listened = time.monotonic()

    def look(self, living: list[int], started: list[int], exits: Mapping[int, int], is_stopping: bool) -> None:
        heartbeat.sign(self._logs)
        self._figures.look()
        beats = tuple(heartbeat.read(self._logs / f"rank{rank}.beat") for rank in self._ranks)
        gone = [beat for pid, beat in zip(started, beats, strict=False) if pid not in living]
        if exits and living and any(beats):  # a session, for which SIGTERM would mean to stop
            self._end_in(_grace_after(gone, exits))
        elif exits and living and not self.is_ending and self._have_printed(exits):  # as torchrun does
            for pid in living:
                self._kill(pid, signal.SIGTERM)
            self._end_in(SCRIPT_GRACE)
        ranks = zip(self._ranks, started, beats, strict=False)
        # what a session does after its end (an export, say) may take any time, and it ends its process itself
        running = {rank: pid for rank, pid, beat in ranks if pid in living and not (beat and _is_over(beat))}
        if not exits:
            self._lingering.look(running)
        may_hang = running and not (self.hang or is_stopping)  # after a stop request a script may take any time
        hang = self._hangs(beats, False)
        if self._is_routine(beats):
            self._used = {}  # the next quiet phase begins at its start
        else:
            hang = self._is_quiet(living) if may_hang else ""
        if hang and may_hang:
            self.hang = hang
            self._write_stacks({rank: pid for rank, pid in enumerate(started) if pid in living})
            self._end_in(0)
        self._kill_if_due(living)

    def _have_printed(self, exits: Mapping[int, int]) -> bool:
        """Whether the ranks that still run have had the time to print an error of their own."""
        now = time.monotonic()
        self._failed_at = self._failed_at or now
        if any(code < 0 for code in exits.values()):  # killed: the others can only miss it
            return True
        if now - self._failed_at < SCRIPT_PRINTS:
            return False
        said = [last_words.raised(last_words.tail(self._logs, rank)) for rank in exits]
        are_victims = all(text and last_words.is_of_peer(text) for text in said)
        return not are_victims or now - self._failed_at > SCRIPT_PRINTS_FIRST

    def _allowed(self, beats: tuple[Beat | None, ...]) -> float:
        if not self._is_routine(beats):
            return 0.0
        if self._hang_minutes is not None:
            return self._hang_minutes
        return max(SCRIPT_HANG_MINUTES, HANG_TIMES_SLOWEST * self._slowest / 60)

    def close(self) -> None:
        self._figures.close()
        self._lingering.close()
        super().close()

    def _is_quiet(self, ranks: list[int]) -> str:
        """Return the description of a hang; '' if there is none.

        Args:
            ranks: Process ids.
        """
        now = time.monotonic()
        if not self._silent_for or now - self._listened < min(_LOOK_EVERY, self._silent_for / 4):
            return ""
        self._listened = now
        output, used = self._written(), _cpu_seconds(ranks)
        spent = sum(max(seconds - self._used.get(key, 0.0), 0.0) for key, seconds in used.items())
        if not self._used or output != self._output or spent > _SHARE * (now - self._quiet_since) + 0.05:
            self._output, self._used, self._quiet_since = output, used, now
            return ""
        silent = now - self._quiet_since
        if silent <= self._silent_for:
            return ""
        stacks = f"{self._logs.name}/rank*.stack.txt"
        return f"no output and no use of the CPU for {silent:.0f} s; stacks of the ranks: {stacks}"

    def _written(self) -> tuple[tuple[str, int], ...]:
        """Return the sizes of what the ranks write: their logs, signs of life and figures."""
        paths = [*self._logs.glob("rank*.log"), *self._logs.glob("rank*.beat")]
        with contextlib.suppress(OSError):
            sizes = sorted((path.name, path.stat().st_size) for path in paths)
            return (*sizes, ("figures", self._figures.size))
        return ()

    def _write_stacks(self, pids: Mapping[int, int]) -> None:
        """Write the stack of each of these ranks into a file, by py-spy if it is installed and allowed."""
        spies: list[tuple[int, subprocess.Popen[bytes]]] = []
        null = subprocess.DEVNULL
        for rank, pid in pids.items():
            with contextlib.suppress(OSError), (self._logs / f"rank{rank}.stack.txt").open("wb") as file:
                try:
                    spies.append((rank, subprocess.Popen(spy(pid), stdin=null, stdout=file, stderr=subprocess.PIPE)))
                except OSError as error:
                    file.write(f"no stack: py-spy cannot be started ({error.strerror}): pip install py-spy\n".encode())
        until = time.monotonic() + _SPYING
        for rank, process in spies:
            try:
                said = process.communicate(timeout=max(until - time.monotonic(), 0.0))[1]
            except subprocess.TimeoutExpired:
                process.kill()
                said = process.communicate()[1]
            if process.returncode:
                text = f"no stack: py-spy failed ({one_line(said.decode(errors='replace'))}); {_MAY_SPY}\n"
                with contextlib.suppress(OSError):
                    (self._logs / f"rank{rank}.stack.txt").write_text(text, encoding="utf-8")


def family(pids: Iterable[int]) -> list[psutil.Process]:
    """Return these processes and all their descendants that are still running."""
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

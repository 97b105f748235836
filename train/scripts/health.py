"""Watches the ranks of a script: finds a hang, writes the stacks, and ends the other ranks after one has died.

A script without a session gives no signs of life. It counts as hanging if for a long time it writes neither output nor
figures, and does not use the CPU. That finds fewer hangs: a rank that waits for a GPU or in an NCCL collective uses the
CPU.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from typing import ClassVar

import psutil

from ..errors import one_line
from ..run import heartbeat
from ..run.heartbeat import Beat
from ..run.run_folder import Run
from ..run.spec import Spec
from ..supervise import last_words
from ..supervise.health import Health, Kill, TaskHealth, grace_after
from ..supervise.timeouts import (
    HANG_TIMES_SLOWEST,
    SCRIPT_GRACE,
    SCRIPT_HANG_MINUTES,
    SCRIPT_PRINTS,
    SCRIPT_PRINTS_FIRST,
)
from .figures import ScriptFigures
from .lingering import Lingering, spy

_SPYING = 20.0
"""Seconds py-spy gets to write the stacks of a script's ranks."""
_MAY_SPY = "to allow it, as root on the host: sysctl kernel.yama.ptrace_scope=0; in a container: --cap-add SYS_PTRACE"
"""How py-spy gets to read another process."""
_LOOK_EVERY = 2.0
_SHARE = 0.01
"""Share of one CPU. Threads that only wait (progress bars, watchdogs, a store's keep-alive) use less."""


class ScriptHealth(TaskHealth):
    """Ends a script that shows no life, and writes its stacks.

    While all its ranks train in a session, their steps are the signs of life. Otherwise it is hanging when nothing
    writes output or figures, or uses the CPU: the work between two steps (an evaluation, say) may take any time.

    Args:
        attempt: Number of the attempt.
        ranks: The ranks of this machine.
    """

    _routine: ClassVar = (heartbeat.TRAINING,)

    def __init__(self, run: Run, spec: Spec, *, attempt: int, ranks: Iterable[int], kill: Kill) -> None:
        minutes = spec.watch.get("hang_minutes")
        super().__init__({"watch.hang_minutes": minutes}, run.logs(attempt), ranks, kill=kill)
        self._silent_for = 60 * (SCRIPT_HANG_MINUTES if minutes is None else float(minutes))
        self._figures, self._failed_at = ScriptFigures(run, spec, attempt), 0.0
        self._lingering = Lingering(lambda text: run.note(reason=f"{text}; to end it: train stop {run.name} --now"))
        self._output: tuple[tuple[str, int], ...] = ()
        self._used: dict[tuple[int, float], float] = {}
        self._quiet_since = self._listened = time.monotonic()

    def look(self, living: list[int], started: list[int], exits: Mapping[int, int], is_stopping: bool) -> None:
        heartbeat.sign(self._logs)
        self._figures.look()
        beats = tuple(heartbeat.read(self._logs / f"rank{rank}.beat") for rank in self._ranks)
        gone = [beat for pid, beat in zip(started, beats, strict=False) if pid not in living]
        if exits and living and any(beats):  # a session, for which SIGTERM would mean to stop
            self._end_in(grace_after(gone, exits))
        elif exits and living and not self.is_ending and self._have_printed(exits):  # as torchrun does
            for pid in living:
                self._kill(pid, signal.SIGTERM)
            self._end_in(SCRIPT_GRACE)
        # what a session does after its end (an export, say) may take any time, and it ends its process itself
        running = {
            rank: pid
            for rank, pid, beat in zip(self._ranks, started, beats, strict=False)
            if pid in living and not (beat and beat.phase == heartbeat.ENDING)
        }
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


class LoopHealth(Health):
    """Watches the loop of a sweep, which may wait for its trials for any time."""

    def look(self, living: list[int], started: list[int], exits: Mapping[int, int], is_stopping: bool) -> None:
        heartbeat.sign(self._logs)


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

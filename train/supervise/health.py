"""Watches running ranks: finds and explains a hang, and ends the other ranks after one has died.

Ranks of a task and of a script with a session give signs of life. What other scripts show: scripts/health.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from ..run import heartbeat
from ..run.heartbeat import Beat
from .timeouts import (
    GRACE_AFTER_EXIT,
    GRACE_AFTER_FAILURE,
    GRACE_AFTER_SIGNAL,
    HANG_LEAST_MINUTES,
    HANG_TIMES_SLOWEST,
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

    def __init__(self, config: Mapping[str, Any], logs: Path, ranks: Iterable[int], *, kill: Kill = os.kill) -> None:
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
        if grace := grace_after(gone, exits):
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


def grace_after(gone: Iterable[Beat | None], exits: Mapping[int, int]) -> float:
    """Return the seconds that the other ranks get after some are gone; 0: they may continue."""
    # ranks end themselves by SIGABRT, as NCCL's watchdog does, so such a rank may not be the first one
    if any(code < 0 and code != -signal.SIGABRT for code in exits.values()):
        return GRACE_AFTER_SIGNAL
    if any(beat is None or beat.phase != heartbeat.ENDING for beat in gone):
        return GRACE_AFTER_FAILURE
    return GRACE_AFTER_EXIT if exits else 0.0

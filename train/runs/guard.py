"""Looking after the living ranks of a launched run: who hangs is ended, and who waits for the dead."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from train.record import heartbeat
from train.record.store import Run
from train.runs.idle import MINUTES, Idle, end, seats
from train.runs.processes import Guard
from train.runs.watch import Watch, stack_of

_KILLED = 0.2
"""Seconds that its peers live on where a signal has ended a rank: all that they could say is that it is gone."""
_GRACE = 3.0
"""The same where it has failed: they may be about to say why."""
_TOLD = 10.0
"""The same where it has said itself why it ends, and to nobody who waits for it: on a rank alone, before it had met the
others, for example."""


def of(run: Run, attempt: int, ranks: Iterable[int]) -> Guard:
    """What looks after this attempt: a task shows signs of life of its own, of a script there is only its output."""
    record = run.read()
    if not record.get("script"):
        return OfTask(run, run.logs(attempt), ranks)
    minutes = (record.get("watch") or {}).get("hang_minutes")
    return OfScript(run.logs(attempt), MINUTES if minutes is None else float(minutes))


class OfTask:
    """Ends ranks that show no sign of life, and peers of one that is gone."""

    def __init__(self, run: Run, logs: Path, ranks: Iterable[int]) -> None:
        self.hang = ""
        self._run, self._logs = run, logs
        limits = tomllib.loads((run.folder / "config.toml").read_text(encoding="utf-8")).get("watch", {})
        start = float(limits.get("start_minutes", 30.0))
        self._watch = Watch(logs, ranks, limits.get("hang_minutes"), start)
        self._dead_since: float | None = None
        self._patience = _GRACE

    def look(self, living: list[int], started: list[int], exits: Mapping[int, int], is_stopping: bool) -> None:
        if not living:
            return
        if self._dead_since is None and self._watch.dead(started):
            self._note_death(_GRACE)
        elif exits:
            self._note_death(_TOLD)
        if _were_killed(exits):
            self._patience = _KILLED
        self.hang = self.hang or self._watch.hangs() or ""
        is_written = not self.hang or self._watch.dump(living)
        if self.hang and self._dead_since is None and is_written:
            self._dead_since = 0.0
        # torchrun alone would give peers that wait for the dead 30 seconds
        if self._dead_since is not None and is_written and time.monotonic() - self._dead_since > self._patience:
            for pid in living:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

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
    """Whether all that are seen to have ended did so by a signal from elsewhere. By SIGABRT ranks end themselves, as
    NCCL's watchdog does: they may not have been the first."""
    return bool(exits) and all(code < 0 and code != -signal.SIGABRT for code in exits.values())


class OfScript:
    """Ends a script that neither speaks nor computes, and writes down what it was doing."""

    def __init__(self, logs: Path, minutes: float) -> None:
        self.hang = ""
        self._logs, self._idle = logs, Idle(logs, minutes)

    def look(self, living: list[int], started: list[int], exits: Mapping[int, int], is_stopping: bool) -> None:
        heartbeat.sign(self._logs)
        if self.hang or is_stopping or not living:  # one that was asked to stop may take its time
            return
        self.hang = self._idle.hangs(living) or ""
        if self.hang:
            for rank, pid in seats(living).items():
                stack_of(pid, self._logs / f"rank{rank}.stack.txt")
            end(living)

    is_ending = False

    def end(self) -> None:
        """Only a task's ranks are on several machines."""

    def close(self) -> None:
        """Its stacks stay."""

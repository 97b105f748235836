"""`train wait`: wait until runs have ended. Imports no torch."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence

from .. import screen
from ..cluster import jobs
from ..errors import EXIT_FAILED, EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_STOPPED, Refused
from ..launcher import keeper, keeper_sign, resumable
from ..monitor.status import RunStatus, here
from ..run import states
from ..run.run_folder import Run
from ..sweeps.kept import rests_for_sweep
from .follow import Changes, end_line

EXIT_TIMEOUT = 124
"""Not all runs have ended in time; the code of timeout(1)."""
_COMES_BACK = 2 * keeper.LONGEST_WAIT
"""Maximum seconds to wait for the keeper to resume a run: it may look after the runs of another folder only."""
_STARTS, _DIES = 60.0, 30.0
"""Maximum seconds for which a created run may have no process, and an ended run processes."""
_LOOK_EVERY, _ASK_EVERY = 0.5, 2.0
"""Seconds between two looks into a run folder, and between two queries to a cluster's engine."""


def wait(runs: Sequence[Run], timeout: float = math.inf) -> int:
    """Wait until all of these runs have ended, and print a line as each one ends. Return the worst of their exit codes.

    Args:
        timeout: seconds after which to return EXIT_TIMEOUT. The runs continue.

    Raises:
        Refused: the record of a run cannot be read, or the engine of a run does not answer.
    """
    until, codes = time.monotonic() + timeout, {EXIT_FINISHED}
    left = [_Awaited(run) for run in runs]
    try:
        while True:
            for one in [*left]:
                if (end := one.end()) is not None:
                    screen.say(end[0], sys.stdout)
                    codes.add(end[1])
                    left.remove(one)
            if not left:
                return next(code for code in (EXIT_FAILED, EXIT_STOPPED, EXIT_FINISHED) if code in codes)
            if (rest := until - time.monotonic()) <= 0:
                return _leave(left, f"not ended within {timeout:g} s", EXIT_TIMEOUT)
            time.sleep(min(_LOOK_EVERY, rest))
    except KeyboardInterrupt:
        return _leave(left, "still running", EXIT_INTERRUPTED)


def _leave(left: list[_Awaited], why: str, code: int) -> int:
    names = [screen.name(one.name) for one in left]
    listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    screen.remark(f"{why}, and left alone: {listed}")
    return code


class _Awaited:
    """A run that is waited for."""

    def __init__(self, run: Run) -> None:
        one = here(run)
        self.name, self._is_job = one.name, jobs.is_submitted(one.record)
        self._run = run.held() if one.is_alive and not self._is_job else run  # it may be renamed meanwhile
        if self._is_job:
            jobs.check_answers(one.record)
        self._tell = Changes(screen.remark)
        self._look_at, self._seen, self._since = 0.0, ("", False), 0.0

    def end(self) -> tuple[str, int] | None:
        """Return the line and the exit code of its end; None: it has not ended."""
        now = time.monotonic()
        if now < self._look_at:
            return None
        self._look_at = now + (_ASK_EVERY if self._is_job else _LOOK_EVERY)
        try:
            if self._is_job:
                record, is_over = jobs.poll(self._run, self._tell)
                one = RunStatus(self._run, record)
            else:
                one = here(self._run)
                is_over = self._is_over(one, now)
        except Refused as error:
            return f"{self.name} was removed" if self._run.is_gone() else str(error), EXIT_FAILED
        self.name = one.name
        if not is_over:
            return None
        line, code = end_line(one)
        return line, code if code in (EXIT_FINISHED, EXIT_STOPPED) else EXIT_FAILED

    def _is_over(self, one: RunStatus, now: float) -> bool:
        """Whether the state of a run of this station stays until its user changes it."""
        if one.state in (states.RUNNING, states.QUEUED) or rests_for_sweep(self._run, one.record):
            return False
        is_alive = self._run.alive()
        if (one.state, is_alive) != self._seen:
            self._seen, self._since = (one.state, is_alive), now
        longest = math.inf if one.state == states.CREATED else _DIES
        if not is_alive:
            longest = _STARTS if one.state == states.CREATED else _COMES_BACK if _comes_back(one) else 0.0
        if longest == _COMES_BACK:
            self._tell(f"{one.name} is {one.state}; waiting for the keeper, which resumes it")
        return now - self._since >= longest


def _comes_back(one: RunStatus) -> bool:
    """Whether a keeper lives that resumes this run."""
    is_wanted = resumable.is_resumable(one.record) and resumable.keeper_may_start(one.record)
    return bool(is_wanted) and keeper_sign.is_alive(one.run.path.parent)

"""The wait of a queued run, in its agent: for other runs, then for its turn. Imports no torch."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable

from ..errors import Refused, one_line
from ..leases import devices
from ..leases.locks import Unusable
from ..leases.tickets import Ticket
from ..run import states
from ..run.run_folder import Run
from ..signals import AFTER, SIGNAL, USER, StopRequest
from ..supervise.attempts import record_end
from . import create_run, giving_way, leasing, notices
from .launches import Resume
from .request import OpenedRun

_LOOK_EVERY, _STOP_EVERY = 1.0, 0.2
"""Seconds between two looks at the queue, and at requests to stop."""


class _Over(Exception):
    """The run does not start: it was stopped, or what it waits for never comes."""

    def __init__(self, state: str, reason: str, by: str | None) -> None:
        super().__init__(reason)
        self.state, self.reason, self.by = state, reason, by


def wait(opened: OpenedRun, after: Iterable[str], stop: StopRequest, say: Callable[[str], None]) -> OpenedRun | None:
    """Wait until a queued run may start. Returns it, ready to start; None: it has ended, which is recorded.

    The check's processes end first, because a run may wait for days.

    Args:
        after: Names of runs that must finish before.
        say: Prints a line on the terminal.
    """
    run = opened.run
    opened.zygote.close()

    def look() -> None:
        if wanted := run.stop_asked():
            raise _Over(
                states.STOPPED,
                f"stopped ({states.WHO.get(wanted, wanted)}) while it waited",
                states.BY.get(wanted, USER),
            )
        if stop.asked:
            raise _Over(states.STOPPED, f"stopped ({stop.reason}) while it waited", stop.by or SIGNAL)

    tell = _Told(run, say)
    try:
        _wait_for_runs(run, after, look, tell)
        _wait_for_turn(opened, look, tell)
        held = opened.held
        opened.lock.leases = held.fds
        again = Resume(
            runs=str(run.path.parent), name=run.path.name, by_keeper=True,
            nproc=None if run.read()["attempts"] or held.wants is None or held.wants.count else "auto",
            leased=held.lease.visible if held.lease is not None else None,
        )  # fmt: skip
        giving_way.count_seconds(run)
        return create_run.at_its_turn(again, opened, look)
    except _Over as over:
        end = over
    except OSError as error:
        end = _Over(states.STOPPED, f"stopped, because it could not start at its turn: {one_line(error)}", SIGNAL)
    except Refused as error:
        end = _Over(states.FAILED, f"cannot start at its turn: {error}", None)
    record_end(run, end.state, reason=end.reason, by=end.by)
    say(f"{run.name} {end.state}: {end.reason}")
    opened.lock.release()
    notices.begin(run)
    return None


class _Told:
    """Records for what the run waits, and prints it, whenever that changes."""

    def __init__(self, run: Run, say: Callable[[str], None]) -> None:
        self._run, self._say, self._last = run, say, ""
        record = run.read()
        has_given_way = bool((record.get("gave_way") or {}).get("since"))
        self._before = f"{record.get('reason')}; " if has_given_way else ""

    def __call__(self, text: str) -> None:
        text = self._before + text
        if text != self._last and self._run.note(reason=text):
            self._last = text
            self._say(f"{self._run.name} {text}")


def _wait_for_runs(run: Run, after: Iterable[str], look: Callable[[], None], tell: _Told) -> None:
    left = [*after]
    while left:
        for name in [*left]:
            other = Run(run.path.parent / name)
            try:
                record = other.read_effective()
            except (OSError, Refused):
                if not other.is_gone():
                    continue  # it cannot be read now
                raise _Over(states.STOPPED, f"stopped, because {name}, for which it waited, is gone", AFTER) from None
            if why := leasing.why_never(other, record):
                raise _Over(states.STOPPED, f"stopped, because {why}, for which it waited", AFTER)
            if record["state"] == states.FINISHED:
                left.remove(name)
                run.note(after=left)
        if left:
            tell(f"waits for {', '.join(left)}")
            _sleep(look)


def _wait_for_turn(opened: OpenedRun, look: Callable[[], None], tell: _Told) -> None:
    """Wait with a ticket until this run is first and has its devices, which are then in `opened.held`."""
    run, held = opened.run, opened.held
    wants, record = held.wants, run.read()
    assert wants is not None
    asked, number = record.get("wants") or {}, record["ticket"]
    note = functools.partial(
        leasing.note_of, run.name, asked.get("gives_way") or "", number, rests_until=held.rests_until
    )
    ticket = held.ticket
    try:
        while True:
            try:
                if ticket is not None and not ticket.is_there():  # somebody has emptied the folder
                    ticket.leave()
                    ticket = None
                ticket = ticket or Ticket(wants.kind, number, run.path, note=note(wants=wants))
                before = ticket.look()
                if not before:
                    held.lease, obstacles = devices.take(wants, note())
                    if held.lease is not None:
                        return
                    tell(f"waits for {wants}, first in the queue: {', '.join(obstacles)}")
                else:
                    tell(f"waits for {wants}, place {len(before) + 1}, after {before[-1].holder.run}")
            except (OSError, Unusable) as error:
                tell(f"waits for {wants}: the queue cannot be read: {error}")
            _sleep(look)
    finally:
        held.ticket = None
        if ticket is not None:
            with contextlib.suppress(OSError):
                ticket.leave()


def _sleep(look: Callable[[], None]) -> None:
    until = time.monotonic() + _LOOK_EVERY
    while time.monotonic() < until:
        look()
        time.sleep(_STOP_EVERY)

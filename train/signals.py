"""Signals that request a stop. Imports nothing heavy: handlers are set before torch is loaded."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from typing import NoReturn

POLITE = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""Each of these signals asks a run to save and stop. The handler only notes that: the run saves between two steps."""

USER, KEEPER, SIGNAL, CTRL_C = "user", "keeper", "signal", "ctrl-c"
WAY, SWEEP, RUNG, AFTER = "way", "sweep", "rung", "after"
"""Who requested a stop, in run.json's `stopped_by`: `train stop`; the keeper, which will resume the run; a signal, for
example from a service manager; a second Ctrl-C; the run itself, which gives way to another one; the sweep, which
resumes its trial when it is resumed itself; the run itself, at a step at which its sweep compares trials; the run
itself, because one for which it waited did not finish. A run that its user stopped is not resumed automatically."""
_SAME = 0.25
"""Seconds within which two SIGINT count as one Ctrl-C: timeout(1) signals a process and then its whole group."""


class StopRequest:
    """Whether this process was asked to stop."""

    def __init__(self, signals: Iterable[signal.Signals] = POLITE) -> None:
        self.asked = False
        self.by = ""
        """Who requested it: USER, KEEPER, SIGNAL or CTRL_C."""
        self.reason = ""
        """What requested it, as text."""
        self.now = False
        """Whether to stop without saving."""
        self.interrupts = 0
        """How often Ctrl-C was typed."""
        self._interrupted = -_SAME
        for number in signals:
            signal.signal(number, self.note)

    def note(self, number: int, frame: object) -> None:
        """Handle a signal."""
        is_new = number == signal.SIGINT and time.monotonic() - self._interrupted > _SAME
        self.interrupts += is_new
        self.ask(SIGNAL, signal.Signals(number).name)
        if is_new:
            self._interrupted = time.monotonic()

    def ask(self, by: str, reason: str, now: bool = False) -> None:
        """Request a stop. The last request counts, except that a request to stop at once stays."""
        if not self.now or now:
            self.by, self.reason = by, reason
        self.now |= now
        self.asked = True

    def forget(self) -> bool:
        """Forget a request of the run itself, to give way. Returns whether it was one, and no other came."""
        if self.by == WAY and not self.now and not self.interrupts:
            self.asked, self.by, self.reason = False, "", ""
            return True
        return False


_mask = threading.local()
"""The signals that the forking thread had blocked before."""


def _before_fork() -> None:
    """Block SIGTERM until the fork is ready for it: an earlier one would be lost there."""
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _after_fork_in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


def _after_fork_in_child() -> None:
    """Restore SIGTERM in a task's own fork: multiprocessing ends processes with SIGTERM and waits for them."""
    if isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), StopRequest):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


# not in the signal handler, which Python runs too late for a process that is about to wait for a lock
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


def end_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent dies (prctl(2), PR_SET_PDEATHSIG)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before prctl
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose parent dies (prctl(2), PR_SET_CHILD_SUBREAPER)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(36, 1)


def leave(code: int) -> NoReturn:
    """End this process at once, after flushing its output.

    Not by sys.exit: a process group can hang in its destructor if other ranks are gone, data workers ignore the SIGTERM
    of Python's cleanup, and a thread that then returns from torch's store aborts the process.
    """
    with contextlib.suppress(OSError, ValueError):  # the log may be on a failing disk
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)

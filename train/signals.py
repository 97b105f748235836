"""Signals that ask for a stop. Imports nothing heavy: handlers stand before torch is loaded."""

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
"""Each of them asks a run to save and to stop. The handler only notes it: saving happens between two steps."""

USER, KEEPER, SIGNAL, CTRL_C = "user", "keeper", "signal", "ctrl-c"
"""Who asked for a stop, as run.json has it under `stopped_by`: `train stop`; the keeper, which will continue the run; a
signal, of a service manager for example; a second Ctrl-C. What a user wanted rests until he wants it otherwise."""
_SAME = 0.25
"""Seconds within which two SIGINT are one Ctrl-C: timeout(1) sends it to a process and then to its whole group."""


class StopRequest:
    """Whether this process was asked to stop."""

    def __init__(self, signals: Iterable[signal.Signals] = POLITE) -> None:
        self.asked = False
        self.by = ""
        """Who asked: USER, KEEPER, SIGNAL or CTRL_C."""
        self.reason = ""
        """How, in words."""
        self.now = False
        """Whether nothing is to be saved."""
        self.interrupts = 0
        """How often Ctrl-C was typed."""
        self._interrupted = -_SAME
        for number in signals:
            signal.signal(number, self.note)

    def note(self, number: int, frame: object) -> None:
        """The handler."""
        is_new = number == signal.SIGINT and time.monotonic() - self._interrupted > _SAME
        self.interrupts += is_new
        self.ask(SIGNAL, signal.Signals(number).name)
        if is_new:
            self._interrupted = time.monotonic()

    def ask(self, by: str, reason: str, now: bool = False) -> None:
        """Ask for a stop. Who asks last is who has asked, but for what must be at once."""
        if not self.now or now:
            self.by, self.reason = by, reason
        self.now |= now
        self.asked = True


_mask = threading.local()
"""The signals that the thread which forks had blocked before."""


def _before_fork() -> None:
    """Hold SIGTERM back until the fork is ready for it: one that came before would be lost there."""
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _after_fork_in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


def _after_fork_in_child() -> None:
    """In a fork of the task's own: multiprocessing ends its processes with SIGTERM, and waits until they have ended."""
    if isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), StopRequest):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


# not in the handler: Python runs it too late for a process that is about to wait for a lock
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


def end_with_parent(parent: int) -> None:
    """Let the kernel end this process when the one that forked it dies (prctl(2), PR_SET_PDEATHSIG)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before the line above
        os.kill(os.getpid(), signal.SIGKILL)


def leave(code: int) -> NoReturn:
    """End this process at once, with what it has printed.

    Not sys.exit: a process group whose peers are gone can hang in its destructor, loader workers ignore the SIGTERM of
    Python's own clean-up, and a thread that comes back from torch's store by then aborts the process.
    """
    with contextlib.suppress(OSError, ValueError):  # a log on a disk that fails
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)

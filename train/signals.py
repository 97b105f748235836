"""Signals that ask for a stop. Imports nothing heavy: handlers stand before torch is loaded."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterable

POLITE = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""Each of them asks a run to save and to stop. The handler only notes it: saving happens between two steps."""


class StopRequest:
    """Whether somebody asked this process to stop."""

    def __init__(self, signals: Iterable[signal.Signals] = POLITE) -> None:
        self.asked = False
        self.at_once = False
        """Whether it is not to be waited for: see runs/interrupt.py."""
        self.reason = ""
        self.interrupts = 0
        """How often Ctrl-C was typed."""
        for number in signals:
            signal.signal(number, self.note)

    def note(self, number: int, frame: object) -> None:
        """The handler."""
        self.asked = True
        self.interrupts += number == signal.SIGINT
        self.reason = signal.Signals(number).name


def die_with_parent(parent: int) -> None:
    """End this process when the one that started it dies: an orphan must not train on beside its successor.

    The kernel's parent-death signal does it at once (prctl(2), PR_SET_PDEATHSIG); it follows the thread that forked,
    so a watch on the parent's id stands beside it.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=watch, daemon=True, name="parent-watch").start()

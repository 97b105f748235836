"""Ctrl-C in a foreground run: the first one stops it after the step, a second one ends it at once, whatever hangs.

A handler of Python's runs only when the main thread comes back from what it waits for in C, a collective for example.
So the signal is also taken from Python's wake-up descriptor, which C writes, by a thread of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from train.record.store import Run
from train.signals import StopRequest

if TYPE_CHECKING:
    import psutil

_SAME = 0.25
"""Seconds within which two SIGINT are one Ctrl-C: timeout(1) sends it to a process and then to its whole group,
and on a busy machine they are seen later than they were sent. Nobody types so fast."""
RECORDING = 3.0
"""Seconds that writing down the end may take: a disk that hangs keeps nobody waiting."""


class _Presses:
    """Counts Ctrl-C."""

    def __init__(self) -> None:
        self.times, self._last = 0, -_SAME

    def add(self) -> int:
        """Which one this is, counted from 1; 0 when it is none of its own."""
        now = time.monotonic()
        if now - self._last < _SAME:
            return 0
        self._last = now
        self.times += 1
        return self.times


def listen(run: Run, stop: StopRequest, end: Callable[[], None], grace: float = 0.0) -> None:
    """From now on the first SIGINT says what it does and how to end at once, and the second one ends this process.

    To be called once, from the main thread, where `stop` already listens.

    Args:
        end: called in a thread after the second one, unless the main thread, which finds `stop.at_once` set, has left
            within `grace` seconds. It does not return.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # loader workers share the pipe; between their fork and their first line a signal would count twice
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    by_thread, by_handler = _Presses(), _Presses()
    lock = threading.Lock()

    def pressed(times: int) -> None:
        if times == 1:
            tell(f"{run.name}: stopping after this step; again: at once")
        stop.at_once |= times > 1
        if times > 1 and lock.acquire(blocking=False):
            threading.Thread(target=finish, daemon=True, name="end-at-once").start()

    def finish() -> None:
        time.sleep(grace)
        end()

    def watch() -> None:
        while True:
            numbers = os.read(reader, 64)
            if signal.SIGINT in numbers:
                pressed(by_thread.add())

    def handler(number: int, frame: object) -> None:
        stop.note(number, frame)
        times = by_handler.add()
        if times > 1:  # where C code keeps the thread from running, and lets handlers
            pressed(times)

    signal.signal(signal.SIGINT, handler)
    threading.Thread(target=watch, daemon=True, name="ctrl-c").start()


def tell(*lines: str) -> None:
    """Lines on the terminal, from any thread or handler, below a bar if there is one."""
    text = "\n".join([*([""] if os.isatty(2) else []), *lines, ""])
    with contextlib.suppress(OSError):
        os.write(2, text.encode(sys.stderr.encoding or "ascii", "replace"))


def end_processes() -> None:
    """SIGKILL to all that this process has started, and what these have; returns when they are gone."""
    import psutil

    with contextlib.suppress(psutil.Error):
        below = psutil.Process().children(recursive=True)
        for process in below:
            with contextlib.suppress(psutil.Error):
                process.kill()
        deadline = time.monotonic() + RECORDING
        while any(map(_lives, below)) and time.monotonic() < deadline:
            time.sleep(0.02)


def _lives(process: psutil.Process) -> bool:
    import psutil

    try:  # one that nobody reaps, in a container without an init, is dead all the same
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def hold(stop: StopRequest) -> None:
    """Let the main thread do nothing more while the process is being ended at once: what it met comes from that."""
    while stop.at_once:
        time.sleep(1)

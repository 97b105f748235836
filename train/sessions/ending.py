"""How the process of a session ends: signals that ask for a stop, exceptions, sys.exit, and a clean exit.

All of these belong to the script too. So handlers and hooks call the ones that the script or a library has set. Imports
no torch.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - a module that ends thread pools at exit, in the order of imports
import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from .. import screen
from ..errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REFUSED, Refused, TrainingFailed
from ..signals import StopRequest, leave
from .waiting import Wait

_NUMBERS = (signal.SIGTERM, signal.SIGINT)
_LINGER = 60.0
"""Seconds that threads, processes and exit functions get to end after the main thread has."""
_MOST = 3
"""Maximum number of threads that are named."""
_LOOK_EVERY = 0.1
"""Seconds between two looks at the handlers: a look takes longer than the rest of a border."""


class Signals(StopRequest):
    """The requests to stop that this process gets by a signal. Calls the handlers that the script or a library sets.

    Handlers that are set later stay behind this one. `look`, at every border of the loop, finds those that were set in
    another way than by signal.signal.
    """

    def __init__(self) -> None:
        self.wait = Wait()
        self._others: dict[int, Any] = {}
        self._is_inside = False
        self._look_at = 0.0
        self._calls_later = True
        numbers = [number for number in _NUMBERS if signal.getsignal(number) is not signal.SIG_IGN or number != 2]
        self._numbers = tuple(numbers)  # a shell lets programs in the background ignore Ctrl-C
        for number in numbers:
            self._others[number] = signal.getsignal(number)
        self._first = dict(self._others)
        self._pid, self._set = os.getpid(), signal.signal
        super().__init__(numbers)
        signal.signal = self._set_other  # at once: until the next look a request to stop would be lost

    def _set_other(self, signalnum: int, handler: Any) -> Any:
        """Do what signal.signal does, but leave this handler in front."""
        if signalnum not in self._numbers or os.getpid() != self._pid:  # a fork, such as a data worker
            return self._set(signalnum, handler)
        before = self._others[signalnum]
        self._take(signalnum, handler)
        return before

    def _take(self, number: int, handler: Any) -> None:
        if handler == self.note:  # a library puts back what it has found
            self._others[number] = self._first[number]
        elif self._calls_later:
            self._others[number] = handler

    def ask(self, by: str, reason: str, now: bool = False) -> None:
        """Request a stop, also of a wait for a batch."""
        super().ask(by, reason, now)
        if os.getpid() == self._pid:
            self.wait.stop_soon()

    def note(self, number: int, frame: object) -> None:
        """Handle a signal."""
        if self.wait.is_ended_by(number):
            return
        if self._is_inside:  # the script's handler calls the one from before it: this one
            return
        self._is_inside = True
        try:
            before = self.interrupts
            super().note(number, frame)
            if self.interrupts > 1:
                raise KeyboardInterrupt
            if self.interrupts > before:
                with contextlib.suppress(OSError):
                    os.write(2, b"\ntrain: stopping after this update; Ctrl-C again ends it at once\n")
            other = self._others.get(number)
            if callable(other) and other is not signal.default_int_handler:
                other(number, frame)
        finally:
            self._is_inside = False

    def look(self) -> None:
        """Put this handler in front of one that was set since, at most every `_LOOK_EVERY` seconds."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + _LOOK_EVERY
            self.renew()

    def renew(self) -> None:
        """Put this handler in front of one that was set since."""
        for number in self._numbers:
            now = signal.getsignal(number)
            if now != self.note:
                self._take(number, now)
                with contextlib.suppress(ValueError):  # not in the main thread
                    self._set(number, self.note)

    def claim(self) -> None:
        """Call only the handlers of before the session from now on.

        For a library that drives the loop: its own way to stop comes before the border that the ranks agree on.
        """
        self._calls_later, self._others = False, dict(self._first)
        self.renew()

    def release(self) -> None:
        """Give the signals back to the handlers of before."""
        if signal.signal == self._set_other:
            signal.signal = self._set
        for number in self._numbers:
            if signal.getsignal(number) == self.note:
                self._set(number, self._others[number] or signal.SIG_DFL)


class Ending:
    """Tells the ends of a process apart, and reports each once.

    Args:
        failed: Called with the exception that ends the process. Returns whether the request was wrong.
        exited: Called at a clean exit. Returns the exit code, or None for Python's own.
        own_code: Returns the code that Python itself ends with then, by what is recorded.
    """

    def __init__(
        self, *, failed: Callable[[BaseException], bool], exited: Callable[[], int | None],
        own_code: Callable[[], int] = lambda: 0,
    ) -> None:  # fmt: skip
        self._failed, self._exited, self._own_code, self._pid = failed, exited, own_code, os.getpid()
        self._is_over = False
        self._code: Any = None
        self._before, self._exit = sys.excepthook, sys.exit
        sys.excepthook, sys.exit = self._raised, self._note_exit
        # not by atexit, which comes after thread pools have ended, so that no checkpoint could be saved
        at_exit: Any = vars(threading)["_register_atexit"]
        at_exit(self._at_exit)

    def is_over(self) -> None:
        """Report nothing at exit: the end is on record."""
        self._is_over = True

    def fail(self, error: TrainingFailed) -> None:
        """End this process as failed, from a thread: the main thread may never come back."""
        if self._is_over:
            return
        self._is_over = True
        with contextlib.suppress(OSError):
            screen.remark(str(error))
        self._report(error)
        leave(EXIT_FAILED)

    def goes_on(self) -> None:
        """Forget a sys.exit() that the script has caught."""
        self._code = None

    @property
    def _is_other(self) -> bool:
        return os.getpid() != self._pid  # a fork, such as a data worker

    def _note_exit(self, code: Any = None, /) -> NoReturn:
        self._code = code
        self._exit(code)

    def _raised(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Record an exception that nobody has caught, print it, and end the process with the code of its end."""
        if self._is_other:
            self._before(kind, error, trace)
            return
        self._is_over = True
        code = {Refused: EXIT_REFUSED, KeyboardInterrupt: EXIT_INTERRUPTED}.get(kind, EXIT_FAILED)
        if isinstance(error, (Refused, TrainingFailed)):
            with contextlib.suppress(OSError):
                screen.remark(str(error))
        elif not isinstance(error, KeyboardInterrupt):
            self._before(kind, error, trace)
        code = EXIT_REFUSED if self._report(error) else code
        if not (sys.flags.interactive or sys.flags.inspect):
            leave_with(code)  # else Python would end with code 1, and wait for ranks that are gone

    def _report(self, error: BaseException) -> bool:
        try:
            return self._failed(error)
        except Exception:
            traceback.print_exc()
            return False

    def _at_exit(self) -> None:
        if self._is_other or self._is_over:
            return
        self._is_over = True
        if self._code not in (None, 0):
            self._report(SystemExit(self._code))
            _leave_later(self._code if isinstance(self._code, int) else 1)
            return
        try:
            code = self._exited()
        except BaseException as error:
            if isinstance(error, (Refused, TrainingFailed)):
                screen.remark(str(error))
            else:
                traceback.print_exc()
            self._report(error)
            code = EXIT_REFUSED if isinstance(error, Refused) else EXIT_FAILED
        if code is not None:
            leave_with(code)
        _leave_later(self._own_code())


def leave_with(code: int) -> NoReturn:
    """End this process with a code of our own, after the exit functions of the script and its libraries."""
    _leave_later(code)
    atexit._run_exitfuncs()
    leave(code)


def _leave_later(code: int) -> None:
    """End this process with this code if it does not end by itself: Python waits for threads and processes for ever.

    The main thread has ended, and how the process ends is on record.
    """

    def wait() -> None:
        time.sleep(_LINGER)
        others = [one.name for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()]
        names = f" ({', '.join(others[:_MOST])})" if others else ""
        with contextlib.suppress(OSError, ValueError):
            screen.remark(
                f"the script ended {_LINGER:.0f} s ago, but a thread, process or exit function of it does not "
                f"end{names}; the process is ended"
            )
        leave(code)

    with contextlib.suppress(RuntimeError):  # no thread can be started
        threading.Thread(target=wait, name="train-lingering", daemon=True).start()

"""Cases in a process of their own, which is ended where one of them hangs: another one makes those after it.

That process says before each case how long it takes by estimate, is told whether there is the time for it, and sends
what it has found. Nothing of it lies on a disk, which may be full.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import psutil

from train.signals import end_with_parent

if TYPE_CHECKING:
    from tests.gpu.harness import Case

PATIENCE, TIMES = 60.0, 3.0
"""A case hangs that takes longer than so many seconds, and than so many times its estimate."""
PATIENCE_ON_CPU = 240.0
"""The same seconds on a CPU, whose cores others may hold: nobody waits there for a lent device."""
START = 5.0
"""Seconds, about, until a process makes its first case."""
_START_LIMIT = 180.0
"""Until it is ended: a driver that hangs, or libraries on a network's disk."""
_WORTH = 0.5
"""Of the time that a case takes by estimate, what must be left for it to be begun."""
_CASE, _ROW, _AGAIN, _OVER = "case", "row", "again", "over"


def row(part: str, what: str, found: str, verdict: str, late: bool = False) -> dict[str, Any]:
    return {"part": part, "what": what, "found": found, "verdict": verdict, "goal": "", "figures": {}, "late": late}


class Pace:
    """How many times longer cases take here than by estimate, which is for one H100."""

    def __init__(self) -> None:
        self._estimated = self._taken = 0.0

    def add(self, estimated: float, taken: float) -> None:
        self._estimated += estimated
        self._taken += taken

    @property
    def factor(self) -> float:
        """At least 1."""
        return max(1.0, self._taken / self._estimated) if self._estimated else 1.0


@dataclasses.dataclass
class Turn:
    """What one process after the other is to make."""

    parts: Sequence[str]
    device: str
    is_small: bool
    folder: str
    ends: float
    """When there is no more time, by time.monotonic()."""
    patience: float = PATIENCE
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    is_over: threading.Event = dataclasses.field(default_factory=threading.Event)
    """Set where it is to end as Ctrl-C ends it."""

    def command(self, fd: int, begin: int) -> list[str]:
        command = [sys.executable, "-m", "tests.gpu", "--device", self.device, "--parts", ",".join(self.parts)]
        command += ["--folder", self.folder, "--serve", str(fd), "--begin", str(begin)]
        return [*command, "--small"] if self.is_small else command


def make(turn: Turn, pace: Pace, add: Callable[[dict[str, Any]], None]) -> None:
    """Make all cases of parts, and add their rows."""
    begin: int | None = 0
    while begin is not None:
        process = _Process(turn, begin, pace, add)
        try:
            begin = process.made()
        except KeyboardInterrupt:
            add(row(process.part, "the rest, and all parts after it", "interrupted", "not checked"))
            raise
        finally:
            process.end()


class _Process:
    """A process that makes cases, as seen from the one that has started it."""

    def __init__(self, turn: Turn, begin: int, pace: Pace, add: Callable[[dict[str, Any]], None]) -> None:
        self._turn, self._pace, self._add = turn, pace, add
        self._connection, other = Pipe()
        # a session of its own: Ctrl-C on the terminal is for this process, which ends that one
        self._process = subprocess.Popen(
            turn.command(other.fileno(), begin), pass_fds=[other.fileno()], start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=os.environ | turn.environment,
        )  # fmt: skip
        other.close()
        self._at = begin
        self.part, self._what, self._estimate = turn.parts[0], "", 0.0
        self._began = time.monotonic()
        self._limit = _START_LIMIT

    def made(self) -> int | None:
        """Take what it finds, to its end. Returns the case at which another process is to begin; None: nowhere."""
        while True:
            try:
                kind, value = self._message()
            except EOFError:
                return self._gone()
            except TimeoutError as error:
                return self._hung(*error.args)
            if kind == _ROW:
                self._add(value)
                continue
            self._account()
            if kind == _CASE:
                self._answer(*value)
            else:
                return self._at if kind == _AGAIN else None

    def end(self) -> None:
        """It, and all that it has started."""
        family: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            family = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        for each in family:
            with contextlib.suppress(psutil.Error):
                each.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that a driver holds cannot be ended
            self._process.wait(10)
        self._connection.close()

    def _message(self) -> Any:
        """The next one.

        Raises:
            EOFError: it has ended.
            TimeoutError: its case takes too long: whether for lack of time, and after how many seconds.
        KeyboardInterrupt: another thread was told to end.
        """
        while not self._connection.poll(0.1):
            now = time.monotonic()
            if self._turn.is_over.is_set():
                raise KeyboardInterrupt
            if now > self._turn.ends:
                raise TimeoutError(True, now - self._began)
            if now - self._began > self._limit:
                raise TimeoutError(False, now - self._began)
            # its own children have the pipe, too
            if self._process.poll() is not None and not self._connection.poll():
                raise EOFError
        return self._connection.recv()

    def _answer(self, part: str, what: str, seconds: float) -> None:
        """Whether a case is to be made."""
        self._at += 1
        self.part, self._what, self._estimate, self._began = part, what, seconds, time.monotonic()
        needed = seconds * self._pace.factor
        self._limit = max(self._turn.patience, TIMES * needed)
        fits = self._turn.ends - self._began >= _WORTH * needed
        if not fits:
            self._what = ""
            left = max(self._turn.ends - self._began, 0.0)
            self._add(row(part, what, f"about {needed:.0f} s, and {left:.0f} s are left", "not checked", late=True))
        with contextlib.suppress(OSError):  # it has ended, which is seen where it is asked next
            self._connection.send(fits)

    def _account(self) -> None:
        if self._what:
            self._pace.add(self._estimate, time.monotonic() - self._began)
        self._what = ""

    def _gone(self) -> int | None:
        code = self._process.wait()
        how = f"its process was ended by {signal.Signals(-code).name}" if code < 0 else f"its process ended with {code}"
        self._add(row(self.part, self._what or "the rest of it", how, "FAILED"))
        return self._at if self._what else None

    def _hung(self, is_late: bool, after: float) -> int | None:
        if is_late:
            words = f"it was not done after {after:.0f} s, when the time was over"
            self._add(row(self.part, self._what or "the rest of it", words, "not checked", late=True))
            if self._what:
                self._add(row(self.part, "the rest of it", "no time was left", "not checked", late=True))
            for name in self._turn.parts[self._turn.parts.index(self.part) + 1 :]:
                self._add(row(name, "left out", "no time was left", "not checked", late=True))
            return None
        self._add(row(self.part, self._what or "the rest of it", f"it hangs: no end after {after:.0f} s", "FAILED"))
        return self._at if self._what else None


def serve(fd: int, parts: Mapping[str, Callable[[], Iterable[Case]]], begin: int) -> None:
    """Be the process that makes cases, from this one on, counted over all of these parts."""
    end_with_parent(os.getppid())
    connection = Connection(fd)
    number = 0
    for part, cases in parts.items():
        try:
            for case in cases():
                number += 1
                if number <= begin:
                    continue
                connection.send((_CASE, (part, case.what, case.seconds)))
                if connection.recv() and not _is_found(connection, part, case):
                    # what it has broken may be the device, as this process sees it
                    _leave(connection, _AGAIN)
        except Exception as error:
            traceback.print_exc()
            connection.send((_ROW, row(part, "the rest of it", _words(error), "FAILED")))
    _leave(connection, _OVER)


def _is_found(connection: Connection, part: str, case: Case) -> bool:
    """Whether a case came to its end."""
    try:
        for found in case.rows():
            with contextlib.suppress(OSError):  # a full disk, where this is written to a file
                print(f"tests.gpu:   {found.what}: {found.found} ({found.verdict})", file=sys.stderr, flush=True)
            connection.send((_ROW, dataclasses.asdict(found) | {"part": part, "late": False}))
    except Exception as error:  # of one case: the others are made all the same
        traceback.print_exc()
        is_full = type(error).__name__ == "OutOfMemoryError"  # torch's: the card is too small for it
        connection.send((_ROW, row(part, case.what, _words(error), "not checked" if is_full else "FAILED")))
        return False
    return True


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def _leave(connection: Connection, word: str) -> None:
    connection.send((word, None))
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(0)  # threads that listen for a stop of the runs that were made here need no goodbye

"""Cases in a process of their own, which is ended where one of them hangs: another one makes those after it.

That process says which case it begins, and sends what it has found. Nothing of it lies on a disk, which may be full.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection

import psutil

from tests.gpu.harness import FAILED, UNCHECKED, Case, Row, Scale, zygote
from train.signals import end_with_parent

START = 180.0
"""Seconds until the first case is begun, at most: a driver that hangs, or libraries on a network's disk."""
_LATE = "no time was left"
_AGAIN = 5
"""The exit code of a process that another one is to follow: an error may have broken the device, as it sees it."""


def cases(scale: Scale, parts: Sequence[str]) -> list[tuple[str, Case]]:
    """All cases of these parts, in order."""
    return [(name, case) for name in parts for case in importlib.import_module(f"tests.gpu.{name}").part(scale)]


def make(scale: Scale, ends: Mapping[str, float], patience: float, add: Callable[[Row], None]) -> None:
    """Make all cases of parts, and add their rows.

    Args:
        ends: maps each part to the time, by time.monotonic(), from which on none of its cases begins. At the last of
            these times the case that is being made is ended.
        patience: seconds after which a case hangs.
    """
    begin: int | None = 0
    part = next(iter(ends))
    while begin is not None:
        process = _Process(scale, ends, begin, part, add)
        try:
            begin = process.made(patience)
        except KeyboardInterrupt:
            add(Row("the rest, and all parts after it", "interrupted", UNCHECKED, part=process.part))
            raise
        finally:
            process.end()
            part = process.part


class _Process:
    """A process that makes cases, as seen from the one that has started it."""

    def __init__(
        self, scale: Scale, ends: Mapping[str, float], begin: int, part: str, add: Callable[[Row], None]
    ) -> None:
        self._parts, self._begin, self._number, self._add = [*ends], begin, begin, add
        self.part, self._what, self._ends = part, "its start", max(ends.values())
        self._connection, there = Pipe(duplex=False)
        self._process = get_context("spawn").Process(target=serve, args=(there, scale, ends, begin))
        self._process.start()
        there.close()

    def made(self, patience: float) -> int | None:
        """Take what it finds, to its end. Returns the case at which another process is to begin; None: nowhere."""
        since, limit = time.monotonic(), max(START, patience)
        while True:
            now = time.monotonic()
            if now > self._ends:
                self._leave_out()
                return None
            if now - since > limit:
                return self._failed(f"it hangs: no end after {now - since:.0f} s")
            if not self._connection.poll(0.1):
                if self._process.is_alive() or self._connection.poll():
                    continue
                return self._gone()  # without an end of the pipe, which its own children have too
            try:
                message = self._connection.recv()
            except EOFError:
                return self._gone()
            if isinstance(message, Row):
                self._add(message)
            else:
                self.part, self._what = message
                self._number, since, limit = self._number + 1, now, patience

    def end(self) -> None:
        """It, and all that it has started."""
        family: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            family = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        for each in family:
            with contextlib.suppress(psutil.Error):
                each.kill()
        self._process.join(10)  # one that a driver holds cannot be ended
        self._connection.close()

    def _gone(self) -> int | None:
        self._process.join()
        code = self._process.exitcode or 0
        if code in (0, _AGAIN):
            return self._number if code else None
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        return self._failed(f"its process {how}")

    def _failed(self, found: str) -> int | None:
        self._add(Row(self._what, found, FAILED, part=self.part))
        return self._number if self._number > self._begin else None

    def _leave_out(self) -> None:
        found = "it was not done when the time was over"
        self._add(Row(f"{self._what}, and the rest of it", found, UNCHECKED, part=self.part, late=True))
        for name in self._parts[self._parts.index(self.part) + 1 :]:
            self._add(Row("left out", _LATE, UNCHECKED, part=name, late=True))


def serve(connection: Connection, scale: Scale, ends: Mapping[str, float], begin: int) -> None:
    """Be the process that makes cases, from this one on, counted over all of these parts."""
    end_with_parent(os.getppid())
    os.setsid()  # Ctrl-C on the terminal is for the other process, which ends this one
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    logging.getLogger("train").addHandler(logging.NullHandler())  # no lines of runs on the terminal
    logging.getLogger("train").propagate = False
    zygote()  # it imports meanwhile
    for part, case in cases(scale, [*ends])[begin:]:
        connection.send((part, case.what))
        if time.monotonic() > ends[part]:
            connection.send(Row(case.what, _LATE, UNCHECKED, part=part, late=True))
        elif not is_found(connection, part, case):
            _leave(_AGAIN)
    _leave(0)


def is_found(connection: Connection, part: str, case: Case) -> bool:
    """Make a case. Whether it came to its end."""
    try:
        for row in case.rows():
            print(f"tests.gpu:   {row.what}: {row.found} ({row.verdict})", file=sys.stderr, flush=True)
            connection.send(dataclasses.replace(row, part=part))
    except Exception as error:  # of one case: the others are made all the same
        traceback.print_exc()
        is_full = type(error).__name__ == "OutOfMemoryError"  # torch's: the card is too small for it
        said = f"{type(error).__name__}: {error}"[:300]
        connection.send(Row(case.what, said, UNCHECKED if is_full else FAILED, part=part))
        return False
    return True


def _leave(code: int) -> None:
    sys.stderr.flush()
    os._exit(code)  # threads that listen for a stop of the runs that were made here need no goodbye

"""Calling a function in a forked process that is thrown away: what a task's own code does there, is not done here."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from train.errors import Refused
from train.signals import end_with_parent

T = TypeVar("T")
_LOOK_EVERY = 0.02
"""Seconds between two looks whether the fork has ended."""


class Told(SystemExit):
    """The function has failed, and what is to be said about it has been said by the process that it failed in."""


def call(function: Callable[[], T], fail: Callable[[BaseException], int], meanwhile: Callable[[], None]) -> T:
    """What `function` returns in a fork of this process, which does `meanwhile` something else.

    Args:
        function: returns what can be pickled.
        fail: called there with what `function` raises, as soon as it does; returns an exit code.

    Raises:
        Told: it has failed; with that exit code.
        Refused: the process died.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        os.close(reader)
        _answer(writer, function, fail, parent)
    os.close(writer)
    try:
        meanwhile()
        answer = _heard(reader, child)
    finally:
        os.close(reader)
        code = _end(child)
    if code > 0:
        raise Told(code)
    if code < 0:
        how = signal.Signals(-code).name
        raise Refused(f"the process that checks the request died of {how}; train run, with the same, shows why")
    result: T = pickle.loads(answer)
    return result


def _heard(reader: int, child: int) -> bytes:
    """What the fork writes until it has ended. A process that its code leaves behind has the pipe open for longer."""
    parts = []
    while True:
        has_ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        if select.select([reader], [], [], 0 if has_ended else _LOOK_EVERY)[0]:
            parts.append(os.read(reader, 1 << 20))
            if parts[-1]:
                continue
            os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
            has_ended = True
        if has_ended:
            return b"".join(parts)


def _end(child: int) -> int:
    """Let nothing be left of the fork, nor of what its code has started. Returns its exit code."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):  # no session of its own yet
            kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])  # not reaped before, so that the ids are its own


def _answer(writer: int, function: Callable[[], Any], fail: Callable[[BaseException], int], parent: int) -> None:
    """In the fork: never returns."""
    code = 1
    try:
        end_with_parent(parent)
        os.setsid()
        try:
            answer = pickle.dumps(function())
        except BaseException as error:
            code = fail(error)
        else:
            with os.fdopen(writer, "wb") as stream:
                stream.write(answer)
            code = 0
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)

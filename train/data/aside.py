"""Runs a function in a fork of this process. Nothing remains of it but its answer."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any

import torch

from .. import breakpoints
from .loader import begin_worker


def aside(function: Callable[[], Any], seconds: float) -> tuple[Any, str]:
    """Call the function in a fork and return its answer. If it gives none: None, and how the fork ended.

    Args:
        function: returns what JSON can represent.
        seconds: Time for the answer. Then the fork is killed, with the processes that it has started.
    """
    is_alone = len(os.listdir("/proc/self/task")) == 1
    reader, writer = os.pipe()
    parent, pid = os.getpid(), os.fork()
    if not pid:  # pragma: no cover # a fork
        try:
            os.close(reader)
            _leave(parent)
            if not is_alone:  # the pool of threads that torch has in the parent does not exist here
                torch.set_num_threads(1)
            with os.fdopen(writer, "w", encoding="utf-8") as file:
                file.write(json.dumps(function()) + "\n")
        finally:
            os._exit(0)
    os.close(writer)
    try:
        answer, is_late = _read_line(reader, time.monotonic() + seconds)
    finally:
        os.close(reader)
        for kill in (os.killpg, os.kill):  # the fork leads its session, unless it has just begun
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if answer.endswith(b"\n"):
        return json.loads(answer), ""
    if is_late:
        return None, f"took more than {seconds:g} seconds"
    return None, f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _read_line(reader: int, deadline: float) -> tuple[bytes, bool]:
    """Return what comes until the end of a line or of the pipe, and whether the deadline passed before."""
    found = b""
    while select.select([reader], [], [], max(deadline - time.monotonic(), 0))[0]:
        part = os.read(reader, 1 << 16)
        found += part
        if not part or part.endswith(b"\n"):
            return found, False
    return found, True


def _leave(parent: int) -> None:
    """Leave the terminal, the signals and the open files to the parent."""
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(nowhere, fd)
    begin_worker(0, parent)
    breakpoints.skip()

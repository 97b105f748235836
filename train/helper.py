"""Processes that do a part of the work beside this one, so that their time, memory or crash does no harm here.

A helper has a session of its own. Its input is a pipe: a helper that must not outlive its owner ends when the pipe
ends, which also the death of the owner brings about.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from . import module_runner
from .gpus import VISIBLE


def start(module: str, *arguments: str, log: Path | None = None, folder: str | None = "/") -> subprocess.Popen[bytes]:
    """Start a module of this package as a helper that sees no GPU.

    Args:
        log: File to which its output is added; None: nowhere.
        folder: Its working folder; None: that of this process.

    Raises:
        OSError: the machine has no resources for a process, or the log cannot be written.
    """
    with log.open("ab") if log is not None else contextlib.nullcontext(subprocess.DEVNULL) as out:
        return subprocess.Popen(
            module_runner.command(module, *arguments), cwd=folder, env={**os.environ, VISIBLE: ""},
            stdin=subprocess.PIPE, stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip


def end(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """End a helper. Returns whether it has ended by itself after the end of its input, and was not killed.

    Args:
        seconds: Time that it gets for that.
    """
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    return True


def leave(process: subprocess.Popen[bytes]) -> None:
    """End the input of a helper, and let it end when it is ready, without waiting for it."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    process.returncode = 0  # else Python warns that it was not waited for


class Helper:
    """A helper that is started again, with pauses, when it has ended."""

    def __init__(
        self,
        start: Callable[[], subprocess.Popen[bytes] | None],
        *,
        pause: float = math.inf,
        longest: float = math.inf,
        delay: float = 0.0,
    ) -> None:
        """
        Args:
            start: Starts it. Returns None if it is not needed now.
            pause: Seconds between two starts; doubled each time that it has ended. Default: it is started once.
            longest: Maximum seconds between two starts.
            delay: Seconds before the first start.
        """
        self._start, self._pause, self._longest = start, pause, longest
        self._again_at = time.monotonic() + delay
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self.process is not None and self.process.poll() is None

    def keep(self, *, at_once: bool = False) -> None:
        """Start it if it is needed and does not run. Call this as often as you like.

        Args:
            at_once: Do not wait for the end of a pause.

        Raises:
            OSError: it cannot be started now. It is tried again after a pause.
        """
        if self.is_alive or (time.monotonic() < self._again_at and not at_once):
            return
        if self.process is not None:  # it was killed, or cannot work
            self._pause = min(2 * self._pause, self._longest)
        self._again_at = time.monotonic() + self._pause
        self.process = self._start() or self.process

    def end(self, seconds: float) -> bool:
        """End it. Returns whether it has ended by itself, and was not killed.

        Args:
            seconds: Time that it gets to end by itself.
        """
        return self.process is None or end(self.process, seconds)

"""How far training is, for people: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import contextlib
import logging
import sys
import time

from train.screen import Bar, has_bar

log = logging.getLogger("train")

_LINE_EVERY = 2.0
"""Seconds between two progress lines in a log file or pipe."""


class Console:
    """A bar, or lines in the log."""

    def __init__(self, name: str, total_steps: int, done: int, bar: bool) -> None:
        self.total_steps = total_steps
        self._bar = Bar(name, total_steps, done, sys.stderr) if bar and has_bar(sys.stderr) else None
        self._next_line = 0.0

    def show(self, step: int, epoch: int, loss: float, samples_per_s: float) -> None:
        """Step and epoch are counted from 1."""
        if self._bar is not None:
            self._bar.show(step, self.total_steps, epoch, loss, samples_per_s)
            return
        now = time.monotonic()
        if now >= self._next_line:
            self._next_line = now + _LINE_EVERY
            log.info(
                "step %d/%d  epoch %d  loss %.4f  %.0f samples/s", step, self.total_steps, epoch, loss, samples_per_s
            )

    def say(self, text: str) -> None:
        """A line that does not tear the bar."""
        with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
            if self._bar is not None:
                self._bar.write(text)
            else:
                log.info(text)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()

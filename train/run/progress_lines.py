"""Folds output with carriage returns: of a line that was redrawn again and again, keeps the last state."""

from __future__ import annotations

import time

UP = b"\x1b[A"
"""The control sequence with which tqdm's progress bars move to the line above."""
EVERY = 10.0
"""Seconds between two lines about a bar when output is followed into a file or pipe."""
LONGEST = 1 << 20
"""Maximum number of bytes to keep of an unfinished line."""


class Folding:
    """Takes output piece by piece and returns the final lines.

    Args:
        every: Seconds between two lines with the current state of a line that is still redrawn; None: only the last
            state.
    """

    def __init__(self, every: float | None = None) -> None:
        self._line = self._held = b""
        self._every, self._given, self._at = every, b"", time.monotonic()

    def feed(self, text: bytes) -> bytes:
        """Take more output. Returns the lines that are final."""
        *whole, rest = (self._line + text).split(b"\n")
        out = [self._folded(line) for line in whole]
        self._line = _state(rest, keep=True)[-LONGEST:]
        return b"".join(out) + self._passing()

    def end(self) -> bytes:
        """Return the rest at the end of the output."""
        line, self._line = _state(self._line).replace(UP, b""), b""
        held, self._held = self._held, b""
        return (held + b"\n" if held and line else held) + line

    def _folded(self, line: bytes) -> bytes:
        shown = _state(line)
        if shown.endswith(UP):  # the bar moves up and will be redrawn
            self._held = shown.replace(UP, b"")
            return b""
        held, self._held = self._held, b""
        return (held + b"\n" if held else b"") + shown.replace(UP, b"") + b"\n"

    def _passing(self) -> bytes:
        now, shown = time.monotonic(), _state(self._line)
        if self._every is None or now - self._at < self._every or not shown or shown == self._given:
            return b""
        self._at, self._given = now, shown
        return shown.replace(UP, b"") + b"\n"


def _state(line: bytes, keep: bool = False) -> bytes:
    """Return the visible state of a line. With `keep`, keep a carriage return at its end: more may follow."""
    body = line.rstrip(b"\r")
    shown = body.rpartition(b"\r")[2]
    return shown + b"\r" if keep and body != line else shown


def fold(text: bytes) -> bytes:
    """Fold complete output."""
    folding = Folding()
    return folding.feed(text) + folding.end()

"""Output with carriage returns as people saw it: of a line that was drawn again and again, its last state."""

from __future__ import annotations

import time

UP = b"\x1b[A"
"""How the progress bars of tqdm go back to the line above."""
EVERY = 10.0
"""Seconds between two lines about a bar that is followed into a file or pipe."""
LONGEST = 1 << 20
"""Bytes of an unfinished line that are kept."""


class Folding:
    """Feed it output as it comes; it gives back what is settled, in whole lines.

    Args:
        every: seconds after which the state of a line that is still being drawn is given as a line of its own;
            None: only its last one.
    """

    def __init__(self, every: float | None = None) -> None:
        self._line = self._held = b""
        self._every, self._given, self._at = every, b"", time.monotonic()

    def feed(self, text: bytes) -> bytes:
        """Take more output. Returns what is settled by it."""
        *whole, rest = (self._line + text).split(b"\n")
        out = [self._folded(line) for line in whole]
        self._line = _state(rest, keep=True)[-LONGEST:]
        return b"".join(out) + self._passing()

    def end(self) -> bytes:
        """What is left when nothing more comes."""
        line, self._line = _state(self._line).replace(UP, b""), b""
        held, self._held = self._held, b""
        return (held + b"\n" if held and line else held) + line

    def _folded(self, line: bytes) -> bytes:
        shown = _state(line)
        if shown.endswith(UP):  # it goes back and will be drawn again
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
    """What is to be seen of a line. With `keep`, a carriage return at its end is kept: more of it may come."""
    body = line.rstrip(b"\r")
    shown = body.rpartition(b"\r")[2]
    return shown + b"\r" if keep and body != line else shown


def fold(text: bytes) -> bytes:
    """The same of output that is complete."""
    folding = Folding()
    return folding.feed(text) + folding.end()

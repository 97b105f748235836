"""What a terminal can show: its characters, its width, a progress bar that fits. Imports no torch."""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import os
import re
import shutil
import sys
import textwrap
import time
import unicodedata
from collections.abc import Iterator
from importlib.util import find_spec
from typing import IO, Any

LONGEST_NAME = 64
"""Columns of a run's name."""
_SHORT_NAME = 24
"""Columns of a name that is longer than that, in a table."""
_PLAIN = {"…": "...", "→": "->", "“": '"', "”": '"', "µ": "u", "·": "*"}
"""What stands for a character that an ASCII locale cannot show."""


def _in_plain_letters(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end]
    return "".join(_PLAIN.get(letter) or ascii(letter)[1:-1] for letter in letters), error.end


codecs.register_error("train.plain", _in_plain_letters)


def tolerate_any_locale() -> None:
    """Let everything be printed in any locale: what it cannot show is written in plain letters."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="train.plain")


def open_what_is_closed() -> None:
    """Let standard input, output and error be nothing where who called this program has closed them: Python has no
    stream for such a one, and the next file that is opened would take its place, and what is printed there."""
    for fd, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(fd)
        except OSError:  # else something has taken it already
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free: this one
        setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115


@contextlib.contextmanager
def results_alone() -> Iterator[None]:
    """While a user's own code runs: what it prints goes to standard error, for standard output is for results.

    What libraries print without Python, and programs that it starts, too.
    """
    kept = -1
    with contextlib.suppress(OSError):  # one of the two is closed
        sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if kept >= 0:
            ctypes.CDLL(None).fflush(None)  # what C has not written yet
            os.dup2(kept, 1)
            os.close(kept)


def width(stream: IO[str]) -> int | None:
    """Columns of a terminal; None where there is none to fit into."""
    try:
        is_terminal = stream.isatty()
    except ValueError:  # closed
        return None
    return shutil.get_terminal_size().columns or None if is_terminal else None


def printable(text: str) -> str:
    """A text of others in one line, without what would steer the terminal."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else " " if letter.isspace() else "?" for letter in text)


def say(text: str, stream: IO[str] | None = None) -> None:
    """A line for people, on standard error unless another stream is given; whoever wrote the words, a line it is.

    Every line that may quote what is in a run folder, which may be a stranger's, is printed with this.
    """
    print(printable(text), file=stream or sys.stderr, flush=True)


def columns_of(text: str) -> int:
    """How many columns of a terminal a printable text takes: a Chinese letter two, an accent none (UAX 11)."""
    if text.isascii():
        return len(text)
    return sum(map(_columns_of_letter, text))


def _columns_of_letter(letter: str) -> int:
    if unicodedata.combining(letter) or unicodedata.category(letter) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


def cut(text: str, columns: int) -> str:
    """The text, or its beginning with an ellipsis where it is longer."""
    if columns_of(text) <= columns:
        return text
    taken, end = 0, 0
    for letter in text:
        taken += _columns_of_letter(letter)
        if taken >= columns:
            break
        end += 1
    return text[:end] + "…"


def name(text: str) -> str:
    """A run's name for a line of text: a folder's may be longer than any that a launch takes."""
    return cut(printable(text), LONGEST_NAME)


def _padded(text: str, columns: int) -> str:
    return text + " " * (columns - columns_of(text))


def wrapped(line: str, columns: int | None, indent: int) -> str:
    """A line folded to so many columns; what is without a blank, as paths are, stays whole to be copied."""
    if columns is None or columns_of(line) <= columns:
        return line
    indent = indent if columns > 2 * indent else 4
    head = re.match(r" *\S+ +", line)
    begin = head[0] if head else ""
    # textwrap counts letters: one that takes two columns gets a second one, which is taken away again
    wide = "".join(letter + "\0" * (_columns_of_letter(letter) - 1) for letter in line[len(begin) :])
    return textwrap.fill(
        wide, columns, initial_indent=begin, subsequent_indent=" " * indent, break_long_words=False,
        break_on_hyphens=False, drop_whitespace=True, replace_whitespace=False,
    ).replace("\0", "")  # fmt: skip


def table(rows: list[list[str]], columns: int | None, dispensable: list[int], elastic: list[int]) -> str:
    """Rows as aligned text. On a narrow terminal columns are left out, and what remains is cut.

    Args:
        rows: the heading first; names come first in each. One that is too long for a name takes no room from the rest.
        dispensable: columns in the order in which they are left out.
        elastic: columns to cut after that, the first one first; none below 8 letters.
    """
    kept = list(range(len(rows[0])))
    widths = [max(columns_of(row[column]) for row in rows) for column in kept]
    names = [columns_of(row[0]) for row in rows]
    widths[0] = max(length if length <= LONGEST_NAME else _SHORT_NAME for length in names)

    def needed() -> int:
        return sum(widths[column] + 2 for column in kept) - 2

    if columns is not None:
        for column in dispensable:
            if needed() > columns:
                kept.remove(column)
        for column in elastic:
            widths[column] = max(widths[column] - max(needed() - columns, 0), min(widths[column], 8))
    return "\n".join("  ".join(_padded(cut(row[c], widths[c]), widths[c]) for c in kept).rstrip() for row in rows)


_LAYOUTS = (
    "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}, EPOCH  LOSS  SPEED]",
    "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, EPOCH  LOSS  SPEED]",
    "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{remaining} left, EPOCH  LOSS]",
    "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{remaining} left, LOSS]",
    "{desc}: {percentage:3.0f}% {n_fmt}/{total_fmt} [{remaining} left, LOSS]",
    "{percentage:3.0f}% {n_fmt}/{total_fmt} [{remaining} left, LOSS]",
    "{percentage:3.0f}% {n_fmt}/{total_fmt} LOSS",
    "{percentage:.0f}% LOSS",
    "LOSS",
)
"""What a bar shows, from wide terminals to narrow ones: the loss goes last."""


_DRAW_EVERY = 0.1
"""Seconds between two drawings of a bar."""


def has_bar(stream: IO[str]) -> bool:
    """Whether a bar can be drawn there: on a terminal, where tqdm is installed. A checkout alone trains without."""
    return stream.isatty() and find_spec("tqdm") is not None


class Bar:
    """A progress bar of a run's steps that shows what fits into its terminal, and always the loss."""

    def __init__(self, name: str, total: int, done: int, stream: IO[str]) -> None:
        from tqdm import tqdm

        self._figures = ("", "", "")
        self._step, self._drawn = done, 0.0
        self._bar: Any = tqdm(
            total=total, initial=done, desc=printable(name), unit="step", dynamic_ncols=True, file=stream,
            bar_format=self._filled(_LAYOUTS[3]),
        )  # fmt: skip

    def show(self, step: int, total: int, epoch: int | None, loss: float | None, speed: float) -> None:
        """Show how far it is; step and epoch counted from 1, speed in samples per second."""
        if loss is not None:
            self._figures = (f"epoch {epoch}", f"loss {loss:.4f}", f"{speed:.0f} samples/s")
        self._step, self._bar.total = step, total
        if step >= total or time.monotonic() - self._drawn >= _DRAW_EVERY:
            self._draw()

    def _draw(self) -> None:
        bar = self._bar
        self._drawn = time.monotonic()
        if bar.n == bar.initial and self._step > bar.n:
            bar.unpause()  # starting the ranks is no part of the speed
        bar.bar_format = self._fitting()
        bar.update(self._step - bar.n)
        bar.refresh()

    def _filled(self, layout: str) -> str:
        for word, figure in zip(("EPOCH", "LOSS", "SPEED"), self._figures, strict=True):
            layout = layout.replace(word, figure)
        return re.sub(r",? *\]$", "]", layout).rstrip()

    def _fitting(self) -> str:
        known = self._bar.format_dict
        columns = known["ncols"]
        for layout in map(self._filled, _LAYOUTS):
            shown = self._bar.format_meter(**known | {"ncols": None, "bar_format": layout})
            if not columns or columns_of(shown) <= columns:
                return layout
        return self._filled(_LAYOUTS[-1]) or "{percentage:.0f}%"

    def write(self, text: str) -> None:
        """A line above the bar."""
        self._bar.write(printable(text), file=self._bar.fp)

    def close(self) -> None:
        if self._bar.n != self._step:
            self._draw()
        self._bar.close()

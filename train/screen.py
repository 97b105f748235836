"""Print to any terminal: its characters, its width, tables and a progress bar that fit. Imports no torch."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from typing import IO, Any

LONGEST_NAME = 64
"""Maximum number of characters of a run's name on the screen."""


def tolerate_any_locale() -> None:
    """Make printing safe in any locale: characters that it lacks are escaped as in Python."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def open_what_is_closed() -> None:
    """Open /dev/null in place of a closed standard input, output or error.

    Otherwise the next file that is opened would get its number, and receive what is printed.
    """
    for fd, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number: fd
            setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115


def drop_what_cannot_be_written() -> None:
    """Discard buffered output that cannot be written, for example on a full disk or a closed pipe.

    Otherwise Python would try again at exit, print an error and change the exit code.
    """
    for fd, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):  # full, or closed
            os.dup2(os.open(os.devnull, os.O_WRONLY), fd)


@contextlib.contextmanager
def results_alone() -> Iterator[None]:
    """Context manager that sends the output of a user's code to standard error. Standard output is for results.

    File descriptor 1 is replaced, so the output of programs that the code starts goes there, too.
    """
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)


def width(stream: IO[str]) -> int | None:
    """Return the columns of a terminal; None if the stream is no terminal."""
    try:
        is_terminal = stream.isatty()
    except ValueError:  # closed
        return None
    return shutil.get_terminal_size().columns or None if is_terminal else None


def printable(text: str) -> str:
    """Return a foreign text in one line, without control characters."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else " " if letter.isspace() else "?" for letter in text)


class PlainLines(logging.Formatter):
    """Formats log lines without control characters, because they may quote names and errors of a user's code."""

    def __init__(self) -> None:
        super().__init__()

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(printable, super().format(record).split("\n")))


def say(text: str, stream: IO[str] | None = None) -> None:
    """Print one line for people, on standard error unless another stream is given.

    Use this for every line that may quote a run folder, whose content may be hostile.
    """
    print(printable(text), file=stream or sys.stderr, flush=True)


def remark(text: str) -> None:
    """Print one message of this program on standard error, after `train: `."""
    say(f"train: {text}")


def name(text: str) -> str:
    """Return the name of a run, shortened to LONGEST_NAME. A folder may have a longer name than a launch allows."""
    text = printable(text)
    return text if len(text) <= LONGEST_NAME else f"{text[: LONGEST_NAME - 1]}…"


def wrapped(line: str, columns: int | None, indent: int) -> str:
    """Fold a line to so many columns. Words such as paths stay whole, so that they can be copied."""
    if columns is None or len(line) <= columns:
        return line
    indent = indent if columns > 2 * indent else 4
    head = re.match(r" *\S+ +", line)
    begin = head[0] if head else ""
    return textwrap.fill(
        line[len(begin) :], columns, initial_indent=begin, subsequent_indent=" " * indent, break_long_words=False,
        break_on_hyphens=False, replace_whitespace=False,
    )  # fmt: skip


def table(rows: list[list[str]], columns: int | None, spare: Collection[int]) -> str:
    """Return rows as aligned text. On a terminal, names and the last column are cut to fit.

    Args:
        rows: the heading first; the first cell of each row is a name.
        columns: width of the terminal; None: no terminal, nothing is cut.
        spare: columns of the table to leave out on a terminal of less than 80 columns.
    """
    from rich.cells import cell_len, set_cell_size

    def cut(text: str, most: int) -> str:
        return text if cell_len(text) <= most else f"{set_cell_size(text, max(most, 1) - 1)}…"

    shown = [number for number in range(len(rows[0])) if columns is None or columns >= 80 or number not in spare]
    cells = [[row[number] for number in shown] for row in rows]
    if columns is not None:
        longest = LONGEST_NAME if columns >= 120 else columns // 3
        cells = [[cut(name, longest), *others] for name, *others in cells]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(map(set_cell_size, row, widths)).rstrip() for row in cells)
    return "\n".join(line if columns is None else cut(line, columns) for line in lines)


def has_bar(stream: IO[str]) -> bool:
    """Whether a progress bar can be drawn: on a terminal, if tqdm is installed."""
    return stream.isatty() and find_spec("tqdm") is not None


class Bar:
    """A progress bar of a run's steps. It shows what fits into the terminal, and always the loss."""

    def __init__(self, name: str, total: int, *, done: int, stream: IO[str]) -> None:
        from tqdm import tqdm

        self._name, self._stream = printable(name), stream
        self._bar: Any = tqdm(
            total=total, initial=done, desc=self._name, unit="step", dynamic_ncols=True, miniters=1, file=stream
        )

    def show(self, step: int, total: int, *, epoch: int | None, loss: str, speed: float) -> None:
        """Show the progress; step and epoch counted from 1, speed in samples per second."""
        bar, columns = self._bar, width(self._stream) or 80
        figures = f"loss {loss}" if loss else ""
        if columns < 50:
            bar.bar_format = "{percentage:.0f}%{postfix}"
        elif columns < 100 + len(self._name):
            bar.bar_format = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{remaining} left{postfix}]"
        else:
            bar.bar_format = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
            figures = f"epoch {epoch}, {figures}, {speed:.0f} samples/s" if figures else ""
        bar.set_postfix_str(figures, refresh=False)
        bar.total = total
        if bar.n == bar.initial and step > bar.n:
            bar.unpause()  # the start of the ranks does not count for the speed
        bar.update(step - bar.n)

    def write(self, text: str) -> None:
        """Print a line above the bar."""
        self._bar.write(printable(text), file=self._bar.fp)

    def close(self) -> None:
        self._bar.close()

"""Shows a run's progress from its folder: a bar, and a line per evaluation. Imports no torch."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TextIO

from .. import format, screen
from ..format import figure, figures
from ..run import metrics
from ..run.log_limit import Place
from ..run.progress_lines import EVERY, Folding
from ..run.record import Record
from ..run.run_folder import Run
from ..screen import Bar

_MOST_SHOWN = 1 << 18
"""Maximum number of bytes of a log to print at once on a terminal."""


class LogTail:
    """Prints new output in the log of a rank.

    A line that is redrawn again and again (a progress bar) is printed in its last state. A terminal that follows the
    log gets every redraw.

    Args:
        every: Seconds between two prints of a line that is still redrawn. None: the log is not followed, print it once.
        most: Maximum number of bytes to print at once, because a terminal is slower than a disk. 0: no limit.
    """

    def __init__(self, path: Path, stream: TextIO, *, every: float | None = EVERY, most: int = 0) -> None:
        self.path, self._stream, self._place, self._most = path, stream, Place(), most
        self._folding = None if every is not None and stream.isatty() else Folding(every)

    def update(self) -> None:
        """Print what is new since the last call."""
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)  # to here: a rank may write faster than this prints
            left = size - self._place.enter(file)
            if self._most and left > self._most:
                skipped, left = left - self._most, self._most
                for start in range(0, skipped, 1 << 20):
                    self._place.has_read(file.read(min(1 << 20, skipped - start)))
                self._put(f"\n[{format.size(skipped)} of output are not shown here; train logs shows them]\n".encode())
            text = None
            while text != b"":  # the folding gets b"" too: a line about a redrawn one may be due
                text = file.read(min(1 << 16, max(left, 0)))
                left -= len(text)
                self._place.has_read(text)
                self._put(self._folding.feed(text) if self._folding else text)

    def end(self) -> None:
        """Print the rest, including an unfinished last line."""
        self.update()
        left = self._folding.end() if self._folding else b""
        self._put(left + b"\n" if left and not left.endswith(b"\n") else left)

    def _put(self, text: bytes) -> None:
        if text and hasattr(self._stream, "buffer"):
            self._stream.buffer.write(text)
            self._stream.buffer.flush()
        elif text:  # Python has put a text in the place of the stream
            self._stream.write(text.decode(errors="replace"))


class LiveView:
    """Shows what is new in a run folder since the last look: a bar on a terminal, and a line per evaluation."""

    def __init__(self, run: Run, stream: TextIO, show_log: bool = False) -> None:
        self.run, self.stream, self.show_log = run, stream, show_log
        self._bar: Bar | None = None
        self._metrics = metrics.Tail(run)
        self._log: LogTail | None = None

    def update(self, record: Record) -> None:
        """Show the record's progress."""
        if self.show_log:
            self._show_log(record)
            return
        total = record.get("total_steps")
        if self._bar is None and total and screen.has_bar(self.stream):
            self._bar = Bar(self.run.name, total, done=record["step"], stream=self.stream)
        if self._bar is not None and total:
            loss, speed = record.get("loss"), record.get("samples_per_s") or 0.0
            text = figure(loss) if loss is not None else ""
            self._bar.show(record["step"], total, epoch=record.get("epoch"), loss=text, speed=speed)
        for line in self._metrics.new():
            if metrics.is_evaluation(line):
                self.say(f"epoch {line['epoch']}  step {line['step']}  {figures(line['eval'])}")

    def say(self, text: str) -> None:
        """Print a line without breaking the bar."""
        if self._bar is not None:
            self._bar.write(text)
        else:
            screen.say(text, self.stream)

    def close(self) -> None:
        if self._log is not None:
            self._log.end()
        if self._bar is not None:
            self._bar.close()

    def _show_log(self, record: Record) -> None:
        if not record.get("attempts"):
            return
        path = self.run.logs(record["attempts"][-1]["number"]) / "rank0.log"
        if self._log is None or self._log.path != path:
            if self._log is not None:
                self._log.end()
            self._log = LogTail(path, self.stream, most=_MOST_SHOWN if self.stream.isatty() else 0)
        self._log.update()

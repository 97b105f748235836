"""How a run progresses, drawn from its folder: one bar, the evaluations as they come. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from train import screen
from train.format import figures
from train.run import metrics
from train.run.progress_lines import EVERY, Folding
from train.run.record import Record
from train.run.run_folder import Run
from train.screen import Bar


class View:
    """Draws what is new in a run folder since it last looked: on a terminal a bar, elsewhere a line an evaluation."""

    def __init__(self, run: Run, stream: IO[str], show_log: bool = False) -> None:
        self.run, self.stream, self.show_log = run, stream, show_log
        self._bar: Bar | None = None
        self._metrics = metrics.Tail(run)
        self._log: tuple[Path, int] | None = None
        self._folding = Folding(EVERY)

    def update(self, record: Record) -> None:
        """Show the record's progress."""
        if self.show_log:
            self._show_log(record)
            return
        total = record.get("total_steps")
        if self._bar is None and total and screen.has_bar(self.stream):
            self._bar = Bar(self.run.name, total, record["step"], self.stream)
        if self._bar is not None and total:
            loss, speed = record.get("loss"), record.get("samples_per_s") or 0.0
            self._bar.show(record["step"], total, record.get("epoch"), loss, speed)
        for line in self._metrics.new():
            if metrics.is_evaluation(line):
                self.say(f"epoch {line['epoch']}  step {line['step']}  {figures(line['eval'])}")

    def say(self, text: str) -> None:
        """A line that does not tear the bar."""
        if self._bar is not None:
            self._bar.write(text)
        else:
            screen.say(text, self.stream)

    def close(self) -> None:
        self._end_log()
        if self._bar is not None:
            self._bar.close()

    def _show_log(self, record: Record) -> None:
        attempts = record.get("attempts") or []
        if not attempts:
            return
        path = self.run.logs(attempts[-1]["number"]) / "rank0.log"
        if self._log is None or self._log[0] != path:
            self._read_log()  # what came to the one before since the last look
            self._end_log()
            self._log = (path, 0)
        self._read_log()

    def _read_log(self) -> None:
        if self._log is None:
            return
        path, at = self._log
        try:
            with path.open("rb") as file:
                file.seek(at)
                text = file.read()
        except OSError:
            return
        self._log = (path, at + len(text))
        self._put(text if self.stream.isatty() else self._folding.feed(text))

    def _put(self, text: bytes) -> None:
        if text:
            self.stream.write(text.decode(errors="replace"))
            self.stream.flush()

    def _end_log(self) -> None:
        """Show what is left of a line that nothing more comes to."""
        left = self._folding.end()
        self._put(left + b"\n" if left and not left.endswith(b"\n") else left)

"""Watching a run from outside: one bar, the evaluations as they come, the end. Imports no torch."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from train import screen
from train.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REFUSED
from train.record import metrics, store
from train.record.progress_lines import Folding
from train.record.record import Record
from train.record.store import Run
from train.runs.control import how_to_go_on
from train.screen import Bar
from train.supervise.decide import CODES

_STATE_EVERY = 10.0
"""Seconds between two lines about a script's progress bar where no terminal can draw it."""


class View:
    """Draws what is new in a run folder since it last looked: on a terminal a bar, elsewhere a line an evaluation."""

    def __init__(self, run: Run, stream: IO[str], show_log: bool = False) -> None:
        self.run, self.stream, self.show_log = run, stream, show_log
        self._bar: Bar | None = None
        self._metrics = metrics.Tail(run)
        self._log: tuple[Path, int] | None = None
        self._folding = Folding(_STATE_EVERY)

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
                figures = "  ".join(f"{k} {v:.4f}" for k, v in line["eval"].items() if v is not None)
                self.say(f"epoch {line['epoch']}  step {line['step']}  {figures}")

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


def follow(run: Run) -> int:
    """Show a run until it ends. Returns the exit code that stands for its end; Ctrl-C ends the following only."""
    record = run.shown()
    view, waits = View(run, sys.stderr, show_log=bool(record.get("script"))), ""
    try:
        while record["state"] in (store.RUNNING, store.CREATED):
            view.update(record)
            if record.get("reason") and record["reason"] != waits:  # of a running one: it waits for other machines
                waits = record["reason"]
                view.say(waits)
            time.sleep(0.2)
            record = run.shown()
        deadline = time.monotonic() + 30
        while run.alive() and time.monotonic() < deadline:  # what follows may remove or resume it
            time.sleep(0.05)
        record = run.shown()
        view.update(record)
    except KeyboardInterrupt:
        return left_alone(run, view.close)
    view.close()
    return tell_end(run, record)


def left_alone(run: Run, close: Callable[[], None]) -> int:
    """What Ctrl-C does to one who follows: `close` ends the following. Returns its exit code; the run goes on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever types it twice means the same
    close()
    print(file=sys.stderr)  # behind the ^C that the terminal shows
    screen.say(f"{run.name} goes on; follow it again with: train logs {run.name} --follow")
    return EXIT_INTERRUPTED


def tell_end(run: Run, record: Record) -> int:
    """Say how a run ended. Returns the exit code that stands for it.

    Args:
        record: run.json with the effective state.
    """
    state, step = record["state"], record.get("step", 0)
    reason = f": {record['reason']}" if record.get("reason") else ""
    figures = "  ".join(f"{k} {v:.4f}" for k, v in (record.get("metrics") or {}).items() if v is not None)
    last = {
        store.FINISHED: f"{run.name} finished after {step} steps  {figures}".rstrip(),
        store.STOPPED: f"{run.name} {record['reason'] or 'stopped'}; {how_to_go_on(record)}",
        store.FAILED: f"{run.name} failed{reason}",
        store.INTERRUPTED: f"{run.name} was interrupted{reason}",
        store.COPY: f"{run.name} was interrupted{reason}",
    }.get(state, f"{run.name} is {state}")
    if not record.get("total_steps") and state == store.FINISHED:  # of a script, or where the steps are not seen
        last = f"{run.name} finished"
    if state == store.FAILED and record["attempts"]:
        for text in record["attempts"][-1].get("last_lines") or ():
            screen.say(f"  | {text}")
    screen.say(last)
    return EXIT_REFUSED if state == store.FAILED and record.get(store.REFUSED) else CODES.get(state, EXIT_FAILED)

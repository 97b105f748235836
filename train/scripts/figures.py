"""The figures of a script while it runs: follows the lines of metrics.jsonl, and notes the last ones in run.json.

The script or its session writes these lines. With --figures a process of reader.py writes them, from the output
of rank 0 or from TensorBoard's files. That process may take any time and memory without harm to the agent.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

from .. import helper
from ..errors import Refused, shortened
from ..helper import Helper
from ..run import metrics
from ..run.metrics import Line
from ..run.run_folder import Run
from ..run.spec import Spec
from .reader import TENSORBOARD

_NOTE_EVERY = 1.0
"""Seconds between two notes in run.json, which is rewritten as a whole."""
_LAST = 2.0
"""Seconds the process gets at the end of an attempt to read the last figures."""


class ScriptFigures:
    """Follows the figures of one attempt."""

    def __init__(self, run: Run, spec: Spec, attempt: int) -> None:
        self._run, self._tail = run, metrics.Tail(run)
        self._changes: dict[str, Any] = {}
        self._note_at, self._rejected, self._step = 0.0, b"", 0
        self._has_expression = any(not text.startswith(TENSORBOARD) for text in spec.figures)
        self._clock = _Clock()
        record: Any = {}
        with contextlib.suppress(Refused):
            record = run.read()
        self._figures: dict[str, float | None] = record.get("last_figures") or {}
        self._metrics: dict[str, float | None] = {}
        if record.get("figures_problem"):
            run.note(figures_problem="")
        arguments = str(run.path), str(attempt), str(os.getpid())
        self._reader = Helper(lambda: helper.start("train.scripts.reader", *arguments))
        if spec.figures:
            with contextlib.suppress(OSError):
                self._reader.keep()

    @property
    def size(self) -> int:
        """Number of bytes in metrics.jsonl, as far as they were read."""
        return self._tail.at

    def look(self) -> None:
        """Read new lines. Called several times a second."""
        lines = [line for line in self._tail.new() if self._take(line)]
        if lines and (step_time := self._clock.seconds_per_step(lines)) is not None:
            self._changes["step_time"] = step_time
        if self._tail.rejected != self._rejected:
            self._rejected = self._tail.rejected
            text = shortened(self._rejected.decode(errors="replace"), 60)
            self._changes["figures_problem"] = f'metrics.jsonl: no JSON object with a whole number "step": {text}'
        if self._changes and time.monotonic() >= self._note_at:
            self._note()

    def _take(self, line: Line) -> bool:
        """Note the figures of a line. Returns whether it says how far the script is: a library may count the steps of
        some figures separately."""
        given, total = metrics.figures_of(line), line.get("total_steps")
        is_place = "loss" in given or line["step"] >= self._step
        if is_place:
            self._step = line["step"]
            self._changes |= {name: line[name] for name in ("step", "epoch") if name in line}
        if "total_steps" in line:
            self._changes["total_steps"] = total if isinstance(total, int) and total > 0 else None
        if metrics.is_evaluation(line):
            self._metrics |= given
            self._changes["metrics"] = self._metrics
            return is_place
        self._figures |= given
        self._changes["last_figures"] = self._figures
        if "loss" in given:
            self._changes["loss"] = given["loss"]
        return is_place

    def _note(self) -> None:
        self._note_at = time.monotonic() + _NOTE_EVERY
        if self._run.note(**self._changes):
            self._changes = {}

    def close(self) -> None:
        """Read what is left at the end of the attempt."""
        if not self._reader.end(_LAST):
            remedy = "simplify the expression" if self._has_expression else "the last metrics are missing"
            self._changes["figures_problem"] = f"--figures: it takes too long to read; {remedy}"
        self.look()
        if self._changes:
            self._note()


class _Clock:
    """Measures the seconds per step since the first line of an attempt."""

    def __init__(self) -> None:
        self._first: tuple[bool, float, int] | None = None

    def seconds_per_step(self, lines: list[Any]) -> float | None:
        """Return the seconds per step up to these new lines; None: not known yet."""
        # lines from TensorBoard's files come minutes late and many at once, but have a time
        has_time = all(isinstance(line.get("wall_time"), float) for line in lines)
        at, step = (lines[-1]["wall_time"] if has_time else time.monotonic()), lines[-1]["step"]
        if self._first is None or self._first[0] != has_time or step < self._first[2]:
            self._first = has_time, lines[0]["wall_time"] if has_time else at, lines[0]["step"] if has_time else step
        elapsed, made = at - self._first[1], step - self._first[2]
        return elapsed / made if made > 0 and elapsed > 0 else None

"""A run in a notebook: its state, progress, last metrics and a small curve. Redrawn in place while a cell waits.

Imports no torch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from html import escape
from typing import Any

from ..format import duration, figure
from ..monitor.status import RunStatus
from ..run import metrics, states
from ..run.record import Record

_EVERY = 1.0
"""Seconds between two drawings."""
_WIDTH, _HEIGHT = 260, 56
"""Pixels of the curve."""
_POINTS = 200
"""Maximum number of points of the curve."""
_COLOURS = {states.FINISHED: "#2e9e5b", states.RUNNING: "#2f7ed8", states.FAILED: "#d64545"}
_OTHER_COLOUR = "#b8860b"


def is_notebook() -> bool:
    """Whether this process is a kernel, whose output cells can be redrawn."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class Cell:
    """Shows a run in the output of a cell. Has the methods of LiveView."""

    def __init__(self, one: RunStatus) -> None:
        self._one = one
        self._handle: Any = None
        self._lines: list[str] = []
        self._drawn = -1e9

    def update(self, record: Record) -> None:
        """Show the record's progress, at most once a second."""
        self._one = RunStatus(self._one.run, record)
        if time.monotonic() - self._drawn >= _EVERY:
            self._draw()

    def say(self, text: str) -> None:
        """Show a line below the run, until the next one."""
        self._lines = [text]

    def close(self) -> None:
        """Show how the run stood at the last update."""
        self._draw()

    def _draw(self) -> None:
        from IPython.display import HTML, display

        self._drawn = time.monotonic()
        drawn = HTML(html(self._one, self._lines))
        if self._handle is None:
            self._handle = display(drawn, display_id=True)
        else:
            self._handle.update(drawn)


def line(text: str) -> str:
    """Return one line as HTML."""
    return f'<div style="font-size: 13px">{escape(text)}</div>'


def html(one: RunStatus, more: Iterable[str] = ()) -> str:
    """Return a run as HTML: nothing in it is a script, and all text is escaped.

    Args:
        more: lines to show below.
    """
    state, step, total, left = one.state, one.step, one.total, one.seconds_left
    colour = _COLOURS.get(state, _OTHER_COLOUR)
    parts = [f'<b>{escape(one.run.name)}</b> <span style="color: {colour}; font-weight: 600">{escape(state)}</span>']
    if total:
        parts.append(f"step {step} of {total}")
    elif step:
        parts.append(f"step {step}")
    parts += [f"{duration(left)} left"] if left is not None else []
    lines = metrics.sampled(one.run)
    parts += [escape(f"{name} {figure(value)}") for name, value in _metrics(one, lines) if value is not None]
    rows = [" &nbsp; ".join(parts)]
    if total:
        share = min(max(step / total, 0.0), 1.0)
        bar = f'<div style="width: {share:.2%}; height: 100%; background: {colour}"></div>'
        track = "height: 6px; max-width: 520px; background: rgba(128, 128, 128, 0.25); margin: 5px 0"
        rows.append(f'<div style="{track}">{bar}</div>')
    rows.append(curve(losses(lines)))
    small = [one.reason, *more, one.next_command]
    rows += [f'<div style="opacity: 0.75; font-size: 12px">{escape(text)}</div>' for text in small if text]
    return f'<div style="font-size: 13px; line-height: 1.5">{"".join(row for row in rows if row)}</div>'


def _metrics(one: RunStatus, lines: list[metrics.Line]) -> list[tuple[str, float | None]]:
    """Return the last loss of training, the metrics of the last evaluation and those of a script, by name.

    The evaluation is one of these lines: while a cell waits, `one.metrics` would search the whole file each second.
    """
    known = one.record.get("metrics") or {}
    last = next((line["eval"] for line in reversed(lines) if metrics.is_evaluation(line)), known)
    evaluated = [(f"eval {name}" if name == "loss" else name, value) for name, value in last.items()]
    own = [(name, value) for name, value in (one.record.get("last_figures") or {}).items() if name != "loss"]
    return [("loss", one.record.get("loss")), *evaluated[:8], *own[:8]]


def losses(lines: list[metrics.Line]) -> list[tuple[int, float]]:
    """Return the steps and losses of the training lines, thinned, the last one always among them."""
    found = [(line["step"], line.get("loss")) for line in lines if not metrics.is_evaluation(line)]
    known = [(step, loss) for step, loss in found if loss is not None]
    return known[:: -(-len(known) // _POINTS) or 1] + known[-1:]


def curve(points: list[tuple[int, float]]) -> str:
    """Return the curve of the loss as SVG; '' for fewer than two points."""
    if len(points) < 2:
        return ""
    steps, losses = zip(*points, strict=True)
    low, high, first, last = min(losses), max(losses), min(steps), max(steps)
    across, up = (_WIDTH - 4) / max(last - first, 1), (_HEIGHT - 4) / ((high - low) or 1)
    path = " ".join(f"{2 + (step - first) * across:.1f},{2 + (high - loss) * up:.1f}" for step, loss in points)
    title = f"loss, step {first} to {last}: {figure(high)} at most, {figure(low)} at least"
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">'
        f"<title>{escape(title)}</title>"
        f'<polyline points="{path}" fill="none" stroke="#2f7ed8" stroke-width="1.5"/></svg>'
    )

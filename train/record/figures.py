"""The figures of one run as pictures inside a page (SVG), whose colours are the page's: they follow its theme."""

from __future__ import annotations

import io
import re
from typing import Any

from train.record import columns
from train.record.columns import LOSS, LR, SPEED, STEP, WAIT
from train.record.plot import MOST_MEASURES, TITLES, Curves, draw, measures
from train.record.store import Run

_INK, _LINE = "#010203", "#040506"
"""Stand for colours of the page: its text, and a run's line."""
_SIZE = (6.2, 2.6)
"""Inches; the page scales it."""


def drawn(run: Run) -> dict[str, str]:
    """The figures by title, as SVG elements; {} where there is nothing to draw."""
    curves = Curves(run.name, columns.of(run), _LINE)
    if not curves.columns.steps:
        return {}
    panels = [LOSS, *(f"eval {name}" for name in measures([curves])[:MOST_MEASURES]), LR, SPEED, STEP, WAIT]
    return {_title(panel): _svg(curves, panel) for panel in panels}


def _title(panel: str) -> str:
    return TITLES[panel].replace("\n", " ") if panel in TITLES else panel.removeprefix("eval ")


def _svg(curves: Curves, panel: str) -> str:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    ink: dict[Any, Any] = dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK
    )
    # text stays text: smaller, in the page's letters, and found by a search in it
    own: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": panel, "text.parse_math": False, "grid.color": _INK}
    with rc_context({**ink, **own, "font.family": "sans-serif", "axes.facecolor": "none", "legend.facecolor": "none"}):
        figure = Figure(_SIZE, layout="constrained")
        axis = figure.subplots()
        draw(axis, [curves], panel)
        axis.set_ylabel("")
        axis.set_xlabel("step", fontsize=9)
        target = io.StringIO()
        figure.savefig(target, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _inline(target.getvalue())


def _inline(text: str) -> str:
    """The element itself, without what only a file has, in the colours of the page."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, count=1, flags=re.DOTALL)
    head, rest = text.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)  # as wide as the page wants it; viewBox says its shape
    rest = rest.replace(_INK, "currentColor").replace(_LINE, "var(--line)")
    return f'{head} role="img">{rest}'.strip()

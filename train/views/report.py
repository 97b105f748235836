"""The report of a run: where its time went, as text or JSON, or one HTML page without network, scripts or files.

Jinja escapes all text that a user may have chosen (names, values, errors, metrics). Matplotlib escapes the text of
curves. A policy in the page forbids scripts.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

from .. import __version__, screen
from ..format import duration
from ..monitor import time_spent
from ..monitor.status import RunStatus
from ..run.durable import check_target, published, read_bytes
from ..run.run_folder import Run, now, seconds_of
from . import listing, settings
from .plot import MOST_MEASURES, TITLES, Curves, draw, measures

SUFFIXES = (".html", ".htm")
_INK, _LINE = "#010203", "#040506"
"""Placeholders for two colours of the page: its text, and the line of a run."""
_SIZE = (6.2, 2.6)
"""Inches. The page scales the drawing."""
_BAR = 24
"""Characters of the longest bar in the text."""


def as_json(one: RunStatus) -> str:
    """Return where the time went, for programs."""
    facts = {"name": one.run.name, "state": one.state, **one.account.as_json()}
    return json.dumps(facts | {"verdict": time_spent.verdict(one.account, one.record)}, indent=1)


def text(one: RunStatus) -> str:
    """Return where the time went, as lines for a terminal."""
    account = one.account
    lines = [f"{screen.name(one.run.name)}: {listing.with_reason(one.state, one.reason)}"]
    found = parts(account)
    whole = f"  {duration(account.whole)} from creation to end"
    lines.append(whole if found else "  no time was recorded")
    width = max((len(part["name"]) for part in found), default=0)
    largest = max((part["share"] for part in found), default=1.0)
    for part in found:
        bar = "#" * round(_BAR * part["share"] / largest)
        spent = duration(part["seconds"])
        lines.append(f"  {part['name']:<{width}}  {spent:>12}  {100 * part['share']:5.1f} %  {bar}".rstrip())
    if account.redone:
        lines.append(f"  redone: {account.redone} steps, {duration(account.again)}")
    lines += [f"  {line}" for line in (*time_spent.verdict(account, one.record), *account.notes)]
    lines.append(f"  explanations and curves: train report {one.run.name} --to {one.run.name}.html")
    columns = screen.width(sys.stdout)
    return "\n".join(screen.wrapped(screen.printable(line), columns, indent=4) for line in lines)


def write(one: RunStatus, target: Path) -> None:
    """Write the page of a run.

    Raises:
        Refused: the page cannot be written.
    """
    check_target(target, SUFFIXES)
    page = html(one)
    with published(target) as partial:
        partial.write_text(page, encoding="utf-8")


def html(one: RunStatus) -> str:
    """Return the page of a run."""
    from jinja2 import Environment

    run, record, spec, account, program = one.run, one.record, one.spec, one.account, one.program
    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_printable)
    environment.filters |= {"duration": duration, "moment": _moment, "end_of": listing.end_of}
    content: dict[str, Any] = {
        "run": run.name,
        "record": record,
        "program": program,
        "get_figures": program.get_figures(run.name),
        "command_line": program.command_line(spec),
        "account": account,
        "parts": parts(account),
        "verdict": time_spent.verdict(account, record),
        "figures": drawn(run),
        "pictures": _pictures(run),
        "settings": settings.listed(spec),
        "facts": _facts(one),
        "made": now(),
        "version": __version__,
    }
    return environment.from_string(template).render(content)


def _printable(value: Any) -> Any:
    """Return a value of the page without control characters that would reverse or hide text. Keep markup as it is."""
    if hasattr(value, "__html__"):
        return value
    text = str(value).encode(errors="backslashreplace").decode()  # the text may be invalid UTF-8
    return "\n".join(map(screen.printable, text.split("\n")))


def parts(account: time_spent.TimeSpent) -> list[dict[str, Any]]:
    """Return the parts that are not 0, in the order of PARTS: name, seconds, share of the whole, explanation."""
    return [
        {"key": key, "name": name, "seconds": account.parts[key], "help": text,
         "share": account.parts[key] / account.whole if account.whole else 0.0}
        for key, (name, text) in time_spent.PARTS.items()
        if account.parts[key] > 0
    ]  # fmt: skip


def _facts(one: RunStatus) -> list[tuple[str, Any]]:
    """Return the rows of the table at the top. The template skips rows without a value."""
    record = one.record
    hosts = dict.fromkeys(str(one["host"]) for one in (*record["attempts"], record) if one.get("host"))
    return [
        *listing.facts(one),
        ("machines", ", ".join(hosts) if len(hosts) > 1 else None),
        ("device", record.get("device")),
        ("samples", record.get("samples")),
        ("started in folder", record.get("cwd")),
        ("data wait", record.get("data_wait")),
    ]


def _moment(stamp: Any) -> str:
    """Return a time as people read it, in UTC."""
    seconds = seconds_of(stamp)
    return str(stamp or "") if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def drawn(run: Run) -> dict[str, str]:
    """Map titles to curves as SVG elements; {} if there is nothing to draw."""
    curves = Curves(run.name, _LINE).read(run)
    left_out = {f"eval {name}" for name in measures([curves])[MOST_MEASURES:]}
    panels = [panel for panel in curves.panels if panel not in left_out]
    return {TITLES.get(panel, panel.removeprefix("eval ")): _svg(curves, panel) for panel in panels}


def _pictures(run: Run) -> dict[str, str]:
    """Map titles to the newest picture of each name that evaluations made, as a data URL."""
    newest = {path.stem.rpartition("-step-")[0]: path for path in sorted(run.images.glob("*-step-*.png"))}
    found = {}
    for name, path in newest.items():
        with contextlib.suppress(OSError):
            content = base64.b64encode(read_bytes(path)).decode()
            found[f"{name}, step {path.stem.rpartition('-')[2].lstrip('0')}"] = f"data:image/png;base64,{content}"
    return found


def _svg(curves: Curves, panel: str) -> str:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    ink: dict[Any, Any] = dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK
    )
    # keep text as text: it is smaller, uses the page's font, and can be searched
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
    """Return the <svg> element without the parts of a file, in the colours of the page."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, count=1, flags=re.DOTALL)
    head, rest = text.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)  # the page sets the width; viewBox keeps the shape
    rest = rest.replace(_INK, "currentColor").replace(_LINE, "var(--line)")
    return f'{head} role="img">{rest}'.strip()

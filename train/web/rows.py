"""A run as a row: the texts of its cells, which the server and the script of the page put into the same places."""

from __future__ import annotations

import re
import time
from typing import Any

from .. import screen
from ..cluster import jobs
from ..errors import Refused, described, one_line
from ..format import figures
from ..monitor.status import RunStatus
from ..run import states
from ..sweeps import kept
from .look import Place

SIGNS = {
    states.RUNNING: "\u25b6", states.FINISHED: "\u2713", states.FAILED: "\u2717", states.STOPPED: "\u25a0",
    states.INTERRUPTED: "!", states.COPY: "\u29c9", states.QUEUED: "\u2026", states.CREATED: "\u2026",
}  # fmt: skip
"""Maps states to a sign beside the word, so that colour is never all that differs."""


_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|.)")
"""Escape sequences of terminals."""


def plain(value: Any) -> Any:
    """Return what a page shows without the escape sequences and control characters that its texts may quote."""
    if isinstance(value, str):
        if value.isprintable():
            return value
        return "\n".join(screen.printable(_ANSI.sub("", line)) for line in value.splitlines())
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def of(place: Place, one: RunStatus) -> dict[str, Any]:
    """Return the cells of a run. A file of it that cannot be read is its reason, and hides no other run."""
    try:
        return _of(place, one)
    except Exception as error:
        line = one_line(str(error) if isinstance(error, Refused) else described(error))
        cells = {"state": one.state, "label": f"? {place.t.get(one.state)}", "reason": line}
        return {
            **cells,
            "key": one.name,
            "name": one.name,
            "url": place.run(one.name),
            "next": f"train show {one.name}",
        }


def _of(place: Place, one: RunStatus) -> dict[str, Any]:
    t, now = place.t, time.time()
    cells = {**head(place, one), "key": one.name, "name": one.name, "url": place.run(one.name), "who": one.owner}
    if one.state == states.OTHER_FORMAT:
        return cells
    cells["result"] = figures(one.result) if not one.is_alive or one.is_at_work else ""
    cells["gpus"] = f"GPU {','.join(one.gpus)}" if one.is_at_work and one.gpus else ""
    if not one.is_alive:
        changed = one.last_change
        cells["when"] = t.ago(now - changed) if changed else ""
    return cells


def head(place: Place, one: RunStatus) -> dict[str, Any]:
    """Return the state, the progress, and what to do next."""
    t, todo = place.t, one.next_command
    is_said = todo and todo.partition(": ")[2] in one.reason
    cells: dict[str, Any] = {
        "state": one.state, "label": f"{SIGNS.get(one.state, '?')} {t.get(one.state)}",
        "reason": one_line(one.reason), "next": "" if is_said else todo,
    }  # fmt: skip
    if one.state == states.OTHER_FORMAT:
        return cells
    if one.total and one.state != states.FINISHED:
        cells["share"] = min(max(one.step / one.total, 0.0), 1.0)
    cells["step"] = t("step", one.done) if one.done else ""
    left = one.seconds_left
    cells["left"] = t("left", t.duration(left)) if left is not None else ""
    cells["saved"] = _saved(place, one) if one.is_at_work or one.state == states.INTERRUPTED else ""
    if one.restarts:
        cells["lost"] = restarted(place, one.restarts, one.seconds_lost)
    return cells


def restarted(place: Place, count: int, lost: float | None) -> str:
    """Return how often ranks were started again, and the seconds that this cost if they are known; '' for never."""
    if count and lost is not None:
        return place.t.count("restarts", count, place.t.duration(lost))
    return place.t.count("restarts_only", count) if count else ""


def _saved(place: Place, one: RunStatus) -> str:
    saved = one.saved
    if saved is not None:
        return place.t("saved", place.t.ago(time.time() - saved[1]), saved[0])
    return place.t("not_saved") if one.program.reports_steps(one.record["attempts"]) else ""


def of_sweep(place: Place, one: RunStatus, trials: list[RunStatus]) -> dict[str, Any]:
    """Return the cells of a sweep, given the runs of its trials."""
    try:
        sweep = kept.find(one.run)
    except OSError:
        sweep = None
    count = len(sweep.trials) if sweep is not None else len(trials)
    trials = [trial for trial in trials if sweep is None or trial.name in sweep.trials]
    finished = sum(trial.state == states.FINISHED for trial in trials)
    done = one.step if one.total else finished  # the sweep counts those that failed, are left out or removed, too
    counts = [
        f"{number} {place.t.get(state)}"
        for state in (states.RUNNING, states.QUEUED, states.FAILED, states.STOPPED, states.INTERRUPTED)
        if (number := sum(trial.state == state for trial in trials))
    ]
    shown = ", ".join([place.t("trials", finished, count), *counts])
    cells = {**of(place, one), "step": shown, "result": "", "sweep": place.t("table")}
    return cells if one.state == states.FINISHED else {**cells, "share": done / count if count else 0.0}


def may(one: RunStatus) -> str:
    """Return what a button may do with a run: stop, resume, or ''."""
    record, state = one.record, one.state
    if one.owner or state in (states.COPY, states.OTHER_FORMAT) or jobs.is_submitted(record):
        return ""
    if one.is_alive:
        return "stop"
    is_ended = state in (states.STOPPED, states.INTERRUPTED, states.FAILED)
    return "resume" if is_ended and not record.get("cluster") else ""

"""The first page: this machine, what happened since the last visit, and the runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ..format import size
from ..leases import devices
from ..monitor.status import RunStatus
from ..run import states
from ..run.run_folder import seconds_of
from . import rows
from .look import Look, Place

_PAGE = 50
"""Number of ended runs on a page."""
_MOST_LIVE = 100
_MOST_NEWS = 8
_LESSON = "projects/course"


def content(place: Place, query: str, page: int, *, since: float = 0.0) -> dict[str, Any]:
    """Return what the page shows.

    Args:
        query: Show only runs with this text in their name, state or reason.
        page: Number of the page of ended runs, counted from 1.
        since: Time of the last visit, in seconds since the epoch; 0: unknown.
    """
    t, found = place.t, place.look.found()
    sweeps = {one.sweep: [] for one in found if one.sweep}  # type: dict[str, list[RunStatus]]
    for one in found:
        if one.trial_of in sweeps:
            sweeps[one.trial_of].append(one)
    shown = [one for one in found if _matches(one, query)] if query else found
    if not query:
        shown = [one for one in found if one.trial_of not in sweeps]
    live, ended = [one for one in shown if one.is_alive], [one for one in shown if not one.is_alive]
    pages = max(-(-len(ended) // _PAGE), 1)
    page = min(max(page, 1), pages)

    def cells(one: RunStatus) -> dict[str, Any]:
        return rows.of_sweep(place, one, sweeps[one.sweep]) if one.sweep else rows.of(place, one)

    alive, news = (
        sum(one.is_alive for one in found),
        _news(place, [one for one in found if one.trial_of not in sweeps], since) if since else [],
    )
    return rows.plain({
        "values": {
            **_machine(place), "count": t.count("count", len(found), alive) if found else "",
            "damaged": t.count("damaged", place.look.damaged) if place.look.damaged else "",
            "pages": t("pages", page, pages) if pages > 1 else "",
            "older": f"?page={page + 1}" if page < pages else "", "newer": f"?page={page - 1}" if page > 1 else "",
            "said": place.look.said(""),
            "nothing_live": t("nothing_live") if found and not live else "",
            "nothing_found": t("nothing_found") if query and not shown else "",
            "since": t("since", t.ago(time.time() - since)) if news else "",
            "first": "" if found else t("first_1"),
        },
        "lists": {
            "devices": [_device(place, one) for one in place.look.machine.devices()],
            "news": news,
            "live": [cells(one) for one in live[:_MOST_LIVE]],
            "ended": [cells(one) for one in ended[(page - 1) * _PAGE : page * _PAGE]],
        },
    })  # type: ignore[no-any-return]  # fmt: skip


def latest(look: Look) -> str:
    """Return the part of an address after /train/ of the run that was started last."""
    found = [one for one in look.found() if not one.trial_of]
    newest = max(found, key=lambda one: seconds_of(one.record.get("started") or one.record.get("created")) or 0.0,
                 default=None)  # fmt: skip
    return f"run/{newest.name}" if newest is not None else ""


def _matches(one: RunStatus, query: str) -> bool:
    texts = (one.name, one.state, one.reason, one.record.get("command_line") or "")
    return all(any(word in text.lower() for text in texts) for word in query.lower().split())


def _machine(place: Place) -> dict[str, str]:
    t, facts = place.t, place.look.machine.facts()
    busy = facts["busy"]
    return {
        "cores": t("cores", f"{facts['cores']:g}") + (t("busy", f"{busy:.1f}") if busy is not None else ""),
        "memory": t("memory", size(facts["memory_used"] or 0), size(facts["memory"] or 0)),
        "disk": t("disk", size(facts["disk_free"] or 0), size(facts["disk"] or 0)),
    }


def _device(place: Place, one: dict[str, Any]) -> dict[str, Any]:
    t, since = place.t, devices.clock(one["since"])
    holder = " ".join(filter(None, [one["run"], f"({one['user']})" if one["user"] else ""]))
    if one["user"]:
        holder = t("held", holder, since) if since else holder
    cells = {"holder": holder or (t("other", one["other"]) if one.get("other") else t("free"))}
    if "core" in one:
        return {"key": f"core-{one['core']}", "device": t("core", one["core"]), "busy": bool(one["user"]), **cells}
    memory = t("memory", size(one["memory_used"] or 0), size(one["memory"])) if one["memory"] else ""
    use = "" if one["use"] is None else t("use", f"{100 * one['use']:.0f}")
    return {"key": one["uuid"], "device": f"GPU {one['gpu']}", "model": one["name"], "use": use, "memory": memory,
            "share": one["use"] or 0.0, **cells}  # fmt: skip


def _news(place: Place, found: Sequence[RunStatus], since: float) -> list[dict[str, Any]]:
    """Return what happened since then: what ended, the failures first, and what was restarted."""
    t = place.t
    order = [states.FAILED, states.INTERRUPTED, states.STOPPED, states.FINISHED]
    changed = [one for one in found if one.state in order and one.last_change >= since]
    news = []
    for one in sorted(changed, key=lambda one: order.index(one.state)):
        cells = rows.of(place, one)
        news.append({**cells, "key": one.name, "text": cells["reason"] or cells.get("result", "")})
    for one in found:
        starts = [seconds_of(attempt["started"]) or 0.0 for attempt in one.record["attempts"][1:]]
        if one.is_alive and any(start >= since for start in starts) and one.restarts:
            news.append({**rows.of(place, one), "key": one.name, "text": ""})
    more = len(news) - _MOST_NEWS
    last = [{"key": "more", "text": t("more", more)}] if more > 0 else []
    return news[:_MOST_NEWS] + last

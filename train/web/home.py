"""The first page: this machine, what happened since the last visit, and the runs."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import quote

from ..format import size
from ..leases import devices
from ..monitor.status import RunStatus
from ..run import states
from ..run.run_folder import seconds_of
from . import rows
from .look import Look, Place

_PAGE = 50
"""Number of ended runs on a page."""
_MOST_LIVE, _MOST_NEWS = 100, 8
"""Maximum number of live runs, and of lines about the time since the last visit."""
_EVERY = 1.0
"""Seconds for which facts are used."""


def content(place: Place, query: str, page: int, *, since: float = 0.0) -> dict[str, Any]:
    """Return what the page shows.

    Args:
        query: Show only runs with this text in their name, state or reason.
        page: Number of the page of ended runs, counted from 1.
        since: Time of the last visit, in seconds since the epoch; 0: unknown.
    """
    look, t = place.look, place.t
    key = ("home", t.language, place.base, query, str(page))
    data = look.kept(key, _EVERY, lambda: _facts(place, query, page))  # the same for all who look now
    said = (*key[:3], str(since))
    news = look.kept(said, _EVERY, lambda: rows.plain(_news(place, since))) if since else []
    told = {"since": t("since", t.ago(time.time() - since)) if news else "", "said": look.said("")}
    return {"values": data["values"] | told, "lists": data["lists"] | {"news": news}}


def _facts(place: Place, query: str, page: int) -> Any:
    t, found, sweeps = place.t, place.look.found(), _sweeps(place.look)
    shown = [one for one in found if _matches(one, query) and (query or one.trial_of not in sweeps)]
    live, ended = [one for one in shown if one.is_alive], [one for one in shown if not one.is_alive]
    pages = max(-(-len(ended) // _PAGE), 1)
    page, asked = min(max(page, 1), pages), f"&q={quote(query)}" if query else ""

    def cells(one: RunStatus) -> dict[str, Any]:
        return rows.of_sweep(place, one, sweeps[one.sweep]) if one.sweep else rows.of(place, one)

    alive = sum(one.is_alive for one in found)
    return rows.plain({
        "values": {
            **_machine(place), "count": t.count("count", len(found), alive) if found else "",
            "damaged": t.count("damaged", place.look.damaged) if place.look.damaged else "",
            "pages": t("pages", page, pages) if pages > 1 else "",
            "older": f"?page={page + 1}{asked}" if page < pages else "",
            "newer": f"?page={page - 1}{asked}" if page > 1 else "",
            "nothing_live": t("nothing_live") if found and not live else "",
            "nothing_found": t("nothing_found") if query and not shown else "",
            "first": "" if found else t("first_1"),
        },
        "lists": {
            "devices": [_device(place, one) for one in place.look.machine.devices()],
            "live": [cells(one) for one in live[:_MOST_LIVE]],
            "ended": [cells(one) for one in ended[(page - 1) * _PAGE : page * _PAGE]],
        },
    })  # fmt: skip


def _sweeps(look: Look) -> dict[str, list[RunStatus]]:
    """Map the ids of sweeps to the runs of their trials."""
    found: dict[str, list[RunStatus]] = {one.sweep: [] for one in look.found() if one.sweep}
    for one in look.found():
        if one.trial_of in found:
            found[one.trial_of].append(one)
    return found


def latest(look: Look) -> str:
    """Return the part of an address after /train/ of the run that was started last."""
    found = [one for one in look.found() if not one.trial_of]
    newest = max(found, key=lambda one: one.started, default=None)
    return f"run/{newest.name}" if newest is not None else ""


def _matches(one: RunStatus, query: str) -> bool:
    texts = (one.name, one.state, one.reason)  # no text for which a file is read
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


def _news(place: Place, since: float) -> list[dict[str, Any]]:
    """Return what happened since then: failures first, then what was restarted and goes on, then what ended well."""
    order, sweeps = (
        [states.FAILED, states.INTERRUPTED, states.RUNNING, states.STOPPED, states.FINISHED],
        _sweeps(place.look),
    )
    found = [one for one in place.look.found() if one.state in order and one.trial_of not in sweeps]
    changed = [one for one in found if (_restarted(one, since) if one.is_alive else one.last_change >= since)]
    changed.sort(key=lambda one: order.index(one.state))
    news = [rows.of(place, one) for one in changed[:_MOST_NEWS]]
    more = len(changed) - len(news)
    last = [{"key": "+more", "text": place.t("more", more)}] if more > 0 else []
    return [{**cells, "text": cells["reason"] or cells.get("result", "")} for cells in news] + last


def _restarted(one: RunStatus, since: float) -> bool:
    starts = [seconds_of(attempt["started"]) or 0.0 for attempt in one.record["attempts"][1:]]
    return one.restarts > 0 and any(start >= since for start in starts)

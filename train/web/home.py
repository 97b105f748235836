"""The first page: this machine, what happened since the last visit, and the runs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from ..format import size
from ..leases import devices
from ..monitor.status import RunStatus
from ..run import folders, states
from ..run.run_folder import seconds_of
from ..sweeps.space import sweep_name
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
    news = rows.plain(_news(place, since)) if since else []
    told = {"since": t("since", t.ago(time.time() - since)) if news else "", "said": look.said("")}
    return {"values": data["values"] | told, "lists": data["lists"] | {"news": news}}


def _facts(place: Place, query: str, page: int) -> Any:
    t, found = place.t, place.look.found()
    sweeps = _sweeps(found)
    hidden = _trials(sweeps)
    shown = [one for one in found if _matches(one, query) and (query or one.name not in hidden)]
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
            "more_live": t("more", len(live) - _MOST_LIVE) if len(live) > _MOST_LIVE else "",
        },
        "lists": {
            "devices": [_device(place, one) for one in place.look.machine.devices()],
            "live": [cells(one) for one in live[:_MOST_LIVE]],
            "ended": [cells(one) for one in ended[(page - 1) * _PAGE : page * _PAGE]],
        },
    })  # fmt: skip


def _sweeps(found: Sequence[RunStatus]) -> dict[str, list[RunStatus]]:
    """Map the ids of sweeps to the runs of their trials. A copy of a trial is none, nor is another user's run."""
    sweeps = {one.sweep: (one, list[RunStatus]()) for one in found if one.sweep}
    for one in found:
        if one.trial_of in sweeps and one.state != states.COPY:
            sweep, trials = sweeps[one.trial_of]
            if one.owner == sweep.owner and sweep_name(one.name) == sweep.name:
                trials.append(one)
    return {name: trials for name, (_, trials) in sweeps.items()}


def _trials(sweeps: Mapping[str, Sequence[RunStatus]]) -> set[str]:
    """Return the names of the runs that are shown with their sweep, given what `_sweeps` returns."""
    return {one.name for trials in sweeps.values() for one in trials}


def latest(look: Look) -> str:
    """Return the part of an address after /train/ of the run that was started last."""
    found = [one for one in look.found() if not one.trial_of and not one.owner and folders.is_name(one.name)]
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
    idle = t("free") if one.get("answers", True) else t("no_answer")
    cells = {"holder": holder or (t("other", one["other"]) if one.get("other") else idle)}
    if "core" in one:
        return {"key": f"core-{one['core']}", "device": t("core", one["core"]), "busy": bool(one["user"]), **cells}
    memory = t("memory", size(one["memory_used"] or 0), size(one["memory"])) if one["memory"] else ""
    use = "" if one["use"] is None else t("use", f"{100 * one['use']:.0f}")
    return {"key": one["uuid"], "device": f"GPU {one['gpu']}", "model": one["name"], "use": use, "memory": memory,
            "share": one["use"] or 0.0, **cells}  # fmt: skip


def _news(place: Place, since: float) -> list[dict[str, Any]]:
    """Return what happened since then: failures first, then what was restarted and goes on, then what ended well."""
    order = [states.FAILED, states.INTERRUPTED, states.COPY, states.RUNNING, states.STOPPED, states.FINISHED]
    every = place.look.found()
    hidden = _trials(_sweeps(every))
    found = [one for one in every if one.state in order and one.name not in hidden]
    changed = [one for one in found if (_deaths(one, since) if one.is_alive else one.last_change >= since)]
    changed.sort(key=lambda one: order.index(one.state))
    news = [{**rows.of(place, one), "lost": _lost(place, one, since)} for one in changed[:_MOST_NEWS]]
    more = len(changed) - len(news)
    last = [{"key": "/more", "text": place.t("more", more)}] if more > 0 else []
    return [{**cells, "text": cells["reason"] or cells.get("result", "")} for cells in news] + last


def _deaths(one: RunStatus, since: float) -> int:
    """Return how often the ranks of a run were started again since then because they had died."""
    return sum(
        before["end"] in (None, "died") and (seconds_of(after["started"]) or 0.0) >= since
        for before, after in itertools.pairwise(one.record["attempts"])
    )


def _lost(place: Place, one: RunStatus, since: float) -> str:
    """Return the restarts since then, and what they have cost, as far as none came before."""
    count = _deaths(one, since)
    return rows.restarted(place, count, one.seconds_lost if count == one.deaths else None)

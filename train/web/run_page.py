"""The page of a run, also compared with others."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from ..errors import Refused
from ..format import figure, figures, size
from ..monitor import time_spent
from ..monitor.status import RunStatus, find_best
from ..run import best, durable, environment, folders, progress_lines, states
from ..run.run_folder import seconds_of
from ..views import listing, settings, sweep
from . import curves, rows
from .look import Look, Place, key_of

_LOG, _LINES = 1 << 16, 400
"""Maximum number of bytes and lines of a log on the page."""
_MOST_ATTEMPTS, _MOST_CHECKPOINTS, _MOST_PICTURES, _MOST_RANKS = 30, 20, 24, 256
_SIZES, _SWEEPS, _BESTS, _FACTS, _CURVES = 60.0, 5.0, 10.0, 5.0, 2.0
"""Seconds for which sizes, tables of sweeps, best values, other facts, and curves are used."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """What the address of the page asks for."""

    others: tuple[str, ...] = ()
    """Names of runs to compare with."""
    rank: int = 0
    mark: str = ""
    """Of the curves that the page has."""


def check_may(look: Look, name: str, what: str, *, created: str) -> None:
    """Raise Refused if there is no button for this, or the page was of another run of this name.

    Args:
        created: When the run was created that the page has shown; '': unknown.
    """
    one = look.one(name)
    if created and created != (one.record.get("created") or ""):
        raise Refused(f"{name} is another run by now; look at it first")
    if rows.may(one) != what:
        raise Refused(f"{name}: the page has no button for this now; in a terminal: train {what} {name}")


def content(place: Place, name: str, asked: Asked) -> dict[str, Any]:
    """Return what the page shows.

    Raises:
        Refused: there is no such run.
    """
    look = place.look
    one, others = look.one(name), [look.one(other) for other in dict.fromkeys(asked.others) if other != name]
    values = rows.of(place, one) | {"said": look.said(name), "owner": place.t("owner", one.owner)}
    if one.sweep and one.total:
        values["step"] = place.t("trials_ended", one.step, one.total)
    if one.state == states.OTHER_FORMAT:
        return {"values": rows.plain(values), "lists": {}, "compared": []}
    may, account, ranks = rows.may(one), one.account, _ranks(one)
    rank = ranks[0] if ranks and asked.rank not in ranks else asked.rank
    shown = [found for found in (one, *others) if found.state != states.OTHER_FORMAT]
    data: dict[str, Any] = {
        "values": values | {
            "metric": _sweep_table(place, one)[0][-1] if one.sweep else "",
            "may_stop": may == "stop", "may_resume": may == "resume", "result": figures(one.result),
            "created": one.record.get("created") or "",
            "command": one.record.get("command_line") or "", "set": settings.as_flags(one.spec),
            "whole": _whole(place, one),
            "redone": place.t.count("redone", account.redone) if account.redone else "",
            "verdict": "\n".join([*time_spent.verdict(account, one.record), *account.notes]),
            "log": _log(one, rank), "log_of": place.t("log_of", _attempt(one)) if _attempt(one) else "",
        },
        "lists": {
            "parts": _parts(place, one), "attempts": _attempts(place, one), "checkpoints": _checkpoints(place, one),
            "settings": _settings(place, one), "facts": _facts(place, one), "commands": _commands(place, one),
            "pictures": _pictures(place, one), "trials": _trials(place, one), "compare": _compare(place, shown),
        },
        "ranks": ranks, "rank": rank, "compared": [found.name for found in shown],
    }  # fmt: skip
    marks = [look.kept(key_of("mark", found), _CURVES, functools.partial(curves.mark, found)) for found in shown]
    data = rows.plain(data | {"mark": " ".join(marks)})
    if data["mark"] != asked.mark:  # read once for all pages that ask now
        data["curves"] = [
            look.kept(
                key_of("curves", found, mark, place.t.language), _CURVES, functools.partial(curves.of, place, found)
            )
            for found, mark in zip(shown, marks, strict=True)
            if not found.sweep
        ]
    return data


def whole(place: Place, name: str, asked: Asked) -> tuple[dict[str, Any], Markup, list[str]]:
    """Return what the page shows, the curve of the loss as an image, and names of other runs to compare with."""
    data, others = content(place, name, asked), [one.name for one in place.look.found() if place.run(one.name)]
    return data, curves.svg(place.look.one(name)), [one for one in others if one != name][:_MOST_RANKS]


# --- the log


def _attempt(one: RunStatus) -> int:
    attempts = one.record["attempts"]
    return attempts[-1]["number"] if attempts else 0


def _ranks(one: RunStatus) -> list[int]:
    """Return the ranks with a log in the last attempt."""
    found = [path.stem.removeprefix("rank") for path in one.run.logs(_attempt(one)).glob("rank*.log")]
    return sorted(int(number) for number in found if number.isascii() and number.isdigit())[:_MOST_RANKS]


def _log(one: RunStatus, rank: int) -> str:
    """Return the last lines of a rank's output in the last attempt."""
    path = one.run.logs(_attempt(one)) / f"rank{rank}.log"
    with contextlib.suppress(OSError):
        text = progress_lines.fold(durable.read_tail(path, _LOG)).decode(errors="replace")
        return "\n".join(text.splitlines()[-_LINES:])
    return ""


# --- tables


def _whole(place: Place, one: RunStatus) -> str:
    seconds = place.t.duration(one.account.whole)
    if not one.account.whole:
        return ""
    return place.t("whole_now", seconds) if one.is_alive else place.t("whole", seconds)


def _parts(place: Place, one: RunStatus) -> list[dict[str, Any]]:
    account = one.account
    return [
        {"key": part, "part": place.t.get(f"part_{part}"), "time": place.t.duration(seconds), "help": text,
         "share": seconds / account.whole, "percent": f"{100 * seconds / account.whole:.0f} %"}
        for part, (_, text) in time_spent.PARTS.items()
        if (seconds := account.parts[part]) > 0 and not one.sweep  # its trials train, not the sweep
    ]  # fmt: skip


def _attempts(place: Place, one: RunStatus) -> list[dict[str, Any]]:
    found = []
    for attempt in reversed(one.record["attempts"][-_MOST_ATTEMPTS:]):
        began, end = seconds_of(attempt["started"]), listing.end_of(attempt, one.state)
        is_last = attempt is one.record["attempts"][-1] and one.state in (
            states.FAILED, states.INTERRUPTED, states.COPY,
        )  # fmt: skip
        lines = attempt.get("last_lines") or [] if is_last else []
        found.append({
            "key": str(attempt["number"]), "number": place.t("attempt", attempt["number"]),
            "made": listing.made(attempt), "ranks": place.t.count("ranks", attempt["world_size"]),
            "when": place.t.ago(time.time() - began) if began else "",
            "end": listing.with_reason(end, attempt.get("reason")),
            "lines": "\n".join(lines),
        })  # fmt: skip
    return found


def _checkpoints(place: Place, one: RunStatus) -> list[dict[str, Any]]:
    found = []
    best_one = place.look.kept(key_of("best", one), _FACTS, lambda: best.best(one.run, one.spec.best_by))
    for step in sorted(one.run.steps_saved(), reverse=True)[:_MOST_CHECKPOINTS]:
        path = one.run.checkpoint(step)
        with contextlib.suppress(OSError):
            when = path.stat().st_mtime
            key = key_of("size", one, str(step), str(when))
            count = place.look.kept(key, _SIZES, lambda path=path: folders.size_of(path))  # type: ignore[misc]
            is_best = best_one is not None and best_one.step == step
            found.append({
                "key": str(step), "step": place.t("step", step), "size": size(count),
                "when": place.t.ago(time.time() - when),
                "best": place.t("best", best_one.metric, figure(best_one.value)) if best_one and is_best else "",
            })  # fmt: skip
    return found


def _settings(place: Place, one: RunStatus) -> list[dict[str, Any]]:
    return [
        {
            "key": each.name,
            "name": each.name,
            "value": _hidden(each.name, each.value),
            "default": place.t("default", _hidden(each.name, each.default)) if each.default else "",
        }
        for each in settings.listed(one.spec)
        if each.is_set
    ]


def _hidden(name: str, value: str) -> str:
    """Return the value of a field, or … if it is a secret."""
    return "…" if environment.shown([f"--{name}={value}"]) == f"--{name}=…" else value  # not as a shell quotes it


def _facts(place: Place, one: RunStatus) -> list[dict[str, Any]]:
    every = place.look.kept(key_of("facts", one), _FACTS, lambda: list(listing.facts(one)))
    facts = [(label, value) for label, value in every if value not in (None, "", {}, [])]
    return [{"key": label, "label": label, "value": str(value)} for label, value in facts]


def _commands(place: Place, one: RunStatus) -> list[dict[str, Any]]:
    """Return what to type for what the page has no button for."""
    if one.owner or not folders.is_name(one.name):
        return []
    name, lacks = one.name, one.program.lacks
    has_saved = bool(one.run.steps_saved())
    commands = {
        "follow": f"train logs {name} --follow" if one.is_alive else "",
        "fork": f"train fork {name} --name NEW" if has_saved and "fork" not in lacks else "",
        "export": f"train export {name} --to {name}.safetensors" if has_saved and "export" not in lacks else "",
        "report": f"train report {name} --to {name}.html",
        "delete": "" if one.is_alive else f"train rm {name}",
    }
    return [{"key": key, "label": place.t(f"do_{key}"), "text": text} for key, text in commands.items() if text]


def _pictures(place: Place, one: RunStatus) -> list[dict[str, Any]]:
    """Return links to the newest picture of each name, as far as this server sends files."""
    try:
        folder = one.run.images.relative_to(Path(place.root).expanduser() if place.files else "/-")
    except ValueError:
        return []
    newest = {path.stem.rpartition("-step-")[0]: path.name for path in sorted(one.run.images.glob("*-step-*.png"))}
    return [
        {"key": name, "text": file, "link": f"{place.files}/{quote(str(folder / file))}"}
        for name, file in [*newest.items()][:_MOST_PICTURES]
    ]


def _sweep_table(place: Place, one: RunStatus) -> list[list[Any]]:
    """Return the table of a sweep, as its CSV has it, with the metric as the head of the mean."""

    def table() -> list[list[Any]]:
        with contextlib.suppress(Exception):  # somebody else may have written sweep.json
            rows, metric = sweep.of_sweep(one.run)
            heads, *lines = sweep.as_csv(rows, metric)
            return [[*heads[: -len(sweep.HEADS)], metric.name], *lines]
        return [[""]]

    return place.look.kept(key_of("sweep", one, one.state, str(one.step)), _SWEEPS, table)


def _trials(place: Place, one: RunStatus) -> list[dict[str, Any]]:
    """Return the table of a sweep."""
    if not one.sweep:
        return []
    heads, *lines = _sweep_table(place, one)
    count = len(heads) - 1
    found = []
    for number, line in enumerate(lines):
        done, trials, mean, deviation, state, top = line[count:]
        spread = f" ± {figure(deviation)}" if deviation is not None else ""
        found.append({
            "key": str(number), "values": "  ".join(f"{name}={value}" for name, value in zip(heads, line, strict=False)
                                                     if name in heads[:count]),
            "count": f"{done}/{trials}", "mean": "-" if mean is None else figure(mean) + spread, "label": state,
            "best": top, "url": place.run(top) if top else "",
        })  # fmt: skip
    return found


def _compare(place: Place, shown: Sequence[RunStatus]) -> list[dict[str, Any]]:
    """Return rows of what differs between runs, and their last and best values; a column for each run."""
    if len(shown) < 2:
        return []
    key = tuple(part for one in shown for part in key_of("bests", one))
    tops = place.look.kept(key, _BESTS, lambda: _bests(shown))
    flats = [settings.compared(one.spec, one.record.get("world_size")) for one in shown]
    table: list[tuple[str, list[str]]] = [(place.t("state"), [rows.head(place, one)["label"] for one in shown])]
    table.append((place.t("place"), [one.done for one in shown]))
    for text, each in (("last", [{**one.result, **one.metrics} for one in shown]), ("top", tops)):
        for name in dict.fromkeys(name for found in each for name in found):
            values = [found.get(name) for found in each]
            table.append((place.t(text, name), ["-" if value is None else figure(value) for value in values]))
    if len({one.arguments for one in shown}) > 1:
        table.append((place.t("arguments"), [one.arguments for one in shown]))
    has_fields = all(one.program.has_fields for one in shown)  # else every field of the others would differ
    names = [name for name in settings.differing_names(flats) if has_fields or all(name in flat for flat in flats)]
    for name in names:
        table.append((name, [_hidden(name, settings.shown(flat.get(name))) for flat in flats]))
    return [
        {"key": f"{number}", "field": field, **{f"c{place}": value for place, value in enumerate(values)}}
        for number, (field, values) in enumerate(table)
    ]


def _bests(shown: Sequence[RunStatus]) -> list[dict[str, float]]:
    find_best(shown)
    return [{**one.best} for one in shown]

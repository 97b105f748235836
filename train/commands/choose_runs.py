"""Which runs a command means: names, patterns, states; in which order, and how many. Imports no torch."""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from train.errors import Refused, nearest
from train.run import folders, states
from train.run.best import aim_of
from train.run.metrics import last_evaluation
from train.run.record import Record
from train.run.run_folder import Run
from train.views import listing

ORDERS = ("created", "name", "state", "step")
"""For --sort, beside fields and figures: the oldest first, by the alphabet, most steps first."""


def is_pattern(name: str) -> bool:
    """Whether a name has wildcards in it: *, ? or [ ]."""
    return any(character in name for character in "*?[")


def matching(runs: Path, names: list[str], must: bool = True) -> list[Run]:
    """The runs with these names, or that match these patterns, each once.

    Args:
        must: whether a pattern that matches nothing is refused.

    Raises:
        Refused: there is no such run, or nothing matches.
    """
    found: dict[str, Run] = {}
    for name in names:
        if not is_pattern(name) or (Run(runs / name).folder / "run.json").exists():
            matched = [folders.find(runs, name)]
        else:
            matched = [run for run in folders.every(runs) if fnmatch.fnmatchcase(run.name, name)]
        if must and not matched:
            raise Refused(f"no run in {runs} matches {name}; train ls lists the runs")
        found |= {run.name: run for run in matched}
    return list(found.values())


def chosen(
    records: list[Record], wanted: str | None, order: str | None, limit: int | None, reverse: bool
) -> list[Record]:
    """Those of these records (the oldest first) that are wanted, in the order wanted.

    Args:
        wanted: states, one or several with commas; None: all.
        order: one of ORDERS, a field (the smallest first), or a figure (the best first); None is `created`.
        limit: how many at most: by `created` the newest ones, otherwise the first ones of the order.

    Raises:
        Refused: there is no such state or order.
    """
    check_names("--sort", [order] if order is not None else [], records)
    if wanted is not None:
        among = [state.strip() for state in wanted.split(",")]
        for state in among:
            if state not in states.ALL:
                raise Refused(f"--state {state}: {_choices(state, states.ALL)}")
        records = [record for record in records if record.get("state") in among]
    if order in (None, "created"):
        records = records[-limit if limit else 0 :]
        return records[::-1] if reverse else records
    known = sorted((record for record in records if _key(record, order) is not None), key=lambda one: _key(one, order))
    unknown = [record for record in records if _key(record, order) is None]
    return [*(known[::-1] if reverse else known), *unknown][:limit]


def _choices(given: str, choices: tuple[str, ...]) -> str:
    return f"must be one of {', '.join(choices)}{nearest(given, choices)}"


def _key(record: Record, order: str) -> Any:
    """What to sort by; None where a run has no such thing."""
    found = listing.value(record, order)
    if order == "state":
        return states.ALL.index(found) if found in states.ALL else len(states.ALL)
    if isinstance(found, int | float):  # before text: a field may be either
        is_most = order == "step" or (order in (record.get("metrics") or {}) and not aim_of(order).is_least)
        return (0, -found if is_most else found) if math.isfinite(found) else None
    return None if found is None else (1, str(found))


def add_details(records: list[Record], runs: Path) -> None:
    """Add to the records of these runs their configuration, and the figures of their last evaluation so far."""
    for record in records:
        run = Run(runs / record["name"])
        record["config"] = run.read_config()
        if not record.get("metrics") and (line := last_evaluation(run)) is not None:
            record["metrics"] = line["eval"]


def check_names(option: str, names: Iterable[str], records: list[Record]) -> None:
    """Refuse columns and orders that none of these runs has. Raises Refused."""
    parts = (part for record in records for part in (record.get("metrics"), record.get("config")) if part)
    known = {*listing.COLUMNS, *ORDERS, "loss", *itertools.chain.from_iterable(parts)}
    for name in names if records else ():
        if name not in known:
            raise Refused(f"{option} {name}: no run here has that{nearest(name, known, '; see: train ls --help')}")

"""Which runs a command means: names, patterns, states; in which order, and how many. Imports no torch."""

from __future__ import annotations

import fnmatch
import math
from pathlib import Path
from typing import Any

from train.errors import Refused, nearest
from train.run import folders, states
from train.run.record import Record
from train.run.run_folder import Run

ORDERS = ("created", "name", "state", "step", "loss")
"""For --sort: the oldest first, by the alphabet, most steps first, the lowest loss first; what has none comes last."""


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
        order: one of ORDERS; None is `created`.
        limit: how many at most: by `created` the newest ones, otherwise the first ones of the order.

    Raises:
        Refused: there is no such state or order.
    """
    if wanted is not None:
        among = [state.strip() for state in wanted.split(",")]
        for state in among:
            if state not in states.ALL:
                raise Refused(f"--state {state}: {_choices(state, states.ALL)}")
        records = [record for record in records if record.get("state") in among]
    if order is not None and order not in ORDERS:
        raise Refused(f"--sort {order}: {_choices(order, ORDERS)}")
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
    if order == "name":
        return record["name"]
    if order == "state":
        return states.ALL.index(record["state"]) if record["state"] in states.ALL else len(states.ALL)
    if order == "step":
        return -record["step"] if record.get("total_steps") else None
    loss = (record.get("metrics") or {}).get("loss", record.get("loss"))  # of the last evaluation, else the last step
    return loss if loss is not None and math.isfinite(loss) else None

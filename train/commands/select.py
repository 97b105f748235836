"""Which runs a command means: names, patterns, states; in which order, and how many. Imports no torch."""

from __future__ import annotations

import contextlib
import fnmatch
import math
from pathlib import Path
from typing import Any

from train.cluster import jobs
from train.errors import Refused, nearest
from train.run import folders, states
from train.run.record import Record
from train.run.run_folder import Run

STATES = (
    states.CREATED, states.QUEUED, states.RUNNING, states.STOPPED, states.INTERRUPTED, states.COPY, states.FAILED,
    states.FINISHED,
)  # fmt: skip
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


def remove(runs: list[Run]) -> list[str]:
    """Delete run folders: all of them, or none where one is alive. Returns lines about what stays of them elsewhere.

    Raises:
        Refused: a run is alive, or a folder cannot be removed.
    """
    every = [*runs, *(other for run in runs for other in jobs.other_nodes(run))]
    with contextlib.ExitStack() as held:
        for run in runs:
            held.enter_context(jobs.without_job(run))
        for run in every:
            lock = run.acquire()
            if lock is None:
                also = f"; nothing was removed of these {len(runs)} runs" if len(runs) > 1 else ""
                raise Refused(f"{run.name} is running; first: train stop {run.name}{also}")
            held.callback(lock.release)
        stays = [line for run in runs if (line := jobs.remove_job(run))]
        for run in reversed(every):
            folders.bury(run)
    return stays


def chosen(
    records: list[Record], states: str | None, order: str | None, limit: int | None, reverse: bool
) -> list[Record]:
    """Those of these records (the oldest first) that are wanted, in the order wanted.

    Args:
        states: one or several with commas; None: all.
        order: one of ORDERS; None is `created`.
        limit: how many at most: by `created` the newest ones, otherwise the first ones of the order.

    Raises:
        Refused: there is no such state or order.
    """
    if states is not None:
        wanted = [state.strip() for state in states.split(",")]
        for state in wanted:
            if state not in STATES:
                raise Refused(f"--state {state}: {_choices(state, STATES)}")
        records = [record for record in records if record.get("state") in wanted]
    if order not in (None, *ORDERS):
        raise Refused(f"--sort {order}: {_choices(str(order), ORDERS)}")
    by_age = order in (None, "created")
    if by_age and limit is not None:
        records = records[len(records) - min(limit, len(records)) :]
    ordered = sorted(records, key=lambda record: _key(record, order or "created"))
    if reverse:
        known = [record for record in ordered if _key(record, order or "created")[0] == 0]
        ordered = known[::-1] + ordered[len(known) :]
    return ordered if limit is None or by_age else ordered[:limit]


def _choices(given: str, choices: tuple[str, ...]) -> str:
    return f"must be one of {', '.join(choices)}{nearest(given, choices)}"


def loss_of(record: Record) -> float:
    """The last evaluation's loss, else that of the last step shown; infinite where there is none."""
    value = (record.get("metrics") or {}).get("loss", record.get("loss"))
    return math.inf if value is None or math.isnan(value) else value


def _key(record: Record, order: str) -> tuple[int, Any]:
    """What to sort by: 0 and the value, or 1 where there is none."""
    if order == "name":
        return 0, record["name"]
    if order == "state":
        return 0, STATES.index(record["state"]) if record.get("state") in STATES else len(STATES)
    if order == "step":
        return (0, -record["step"]) if record.get("total_steps") else (1, 0)
    if order == "loss":
        loss = loss_of(record)
        return (1, 0.0) if math.isinf(loss) else (0, loss)
    return 0, 0  # created: they come in this order

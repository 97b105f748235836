"""`train ls`: the runs there are."""

from __future__ import annotations

import csv
import itertools
import json
import math
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from train import screen
from train.cluster import jobs
from train.commands.completion_values import words
from train.commands.options import add_json, add_names, matching
from train.commands.parser import Parser, number
from train.errors import EXIT_FINISHED, Refused, nearest
from train.run import states
from train.run.best import aim_of
from train.run.metrics import last_evaluation
from train.run.record import Record
from train.run.run_folder import Run
from train.views.listing import COLUMNS, listing, value

_ORDERS = ("created", "name", "state", "step")
"""For --sort, beside fields and figures: the oldest first, by the alphabet, most steps first."""


def add_arguments(parser: Parser) -> None:
    """Which ones, and in which order."""
    add = parser.add_argument
    add_names(parser, "*")
    text = "only these, with commas: running, stopped, interrupted, copy, failed, …"
    add("--state", metavar="STATE", help=text, offer=words(*states.ALL))
    text = "created (the default), step (most first), a figure (the best first), or whatever --columns takes"
    add("--sort", metavar="BY", default="created", help=text, offer=words(*_ORDERS, "loss"))
    text = (
        "with commas: name, state, step, ranks, created, started, result, owner; fields (optim.lr); figures (accuracy)"
    )
    add("--columns", metavar="NAMES", help=text)
    add("--csv", action="store_true", help="the table as comma-separated values")
    add("--reverse", action="store_true", help="the other way round")
    add("-n", "--limit", metavar="N", help="at most so many: the newest, or with --sort the first ones")
    add_json(parser)


def run(options: Namespace, runs: Path) -> int:
    """Print a table, or JSON."""
    if options.json and (options.csv or options.columns is not None):
        raise Refused("--json prints all there is of a run; leave out --csv and --columns")
    limit = number("limit", options.limit, 1)
    records = jobs.statuses(matching(runs, options.names or ["*"], must=False), screen.remark)
    is_part = bool(options.names or records)
    columns = tuple(map(str.strip, options.columns.split(","))) if options.columns is not None else COLUMNS
    if options.json or options.columns is not None or options.sort not in _ORDERS:
        _add_details(records, runs)
    _check_names("--columns", columns, records)
    _check_names("--sort", (options.sort,), records)
    if options.state is not None:
        records = _in_states(options.state, records)
    records = _ordered(records, options.sort, limit, options.reverse)
    if options.csv:
        rows = [[value(record, column, repr) for column in columns] for record in records]
        csv.writer(sys.stdout, lineterminator="\n").writerows([columns, *rows])
    else:
        print(json.dumps(records, indent=1, default=str) if options.json else listing(records, runs, is_part, columns))
    return EXIT_FINISHED


def _add_details(records: list[Record], runs: Path) -> None:
    """Add to the records of these runs their configuration, and the figures of their last evaluation so far."""
    for record in records:
        run = Run(runs / record["name"])
        record["config"] = run.used_config()
        if not record.get("metrics") and (line := last_evaluation(run)) is not None:
            record["metrics"] = line["eval"]


def _check_names(option: str, names: tuple[str, ...], records: list[Record]) -> None:
    """Refuse columns and orders that none of these runs has. Raises Refused."""
    parts = (part for record in records for part in (record.get("metrics"), record.get("config")) if part)
    known = {*COLUMNS, *_ORDERS, "loss", "owner", *itertools.chain.from_iterable(parts)}
    for name in names if records else ():
        if name not in known:
            raise Refused(f"{option} {name}: no run here has that{nearest(name, known, '; see: train ls --help')}")


def _in_states(wanted: str, records: list[Record]) -> list[Record]:
    """Those in one of these states, given with commas. Raises Refused if there is no such state."""
    among = [state.strip() for state in wanted.split(",")]
    for state in among:
        if state not in states.ALL:
            raise Refused(f"--state {state}: must be one of {', '.join(states.ALL)}{nearest(state, states.ALL)}")
    return [record for record in records if record.get("state") in among]


def _ordered(records: list[Record], order: str, limit: int | None, reverse: bool) -> list[Record]:
    """These records (the oldest first) in the order wanted, those that have no such thing at the end.

    Args:
        order: one of _ORDERS, a field (the smallest first), or a figure (the best first).
        limit: how many at most: by `created` the newest ones, otherwise the first ones of the order.
    """
    if order == "created":
        records = records[-limit if limit else 0 :]
        return records[::-1] if reverse else records
    keys = [(_key(record, order), record) for record in records]
    known = sorted((pair for pair in keys if pair[0] is not None), key=lambda pair: pair[0], reverse=reverse)
    return [record for _, record in [*known, *(pair for pair in keys if pair[0] is None)]][:limit]


def _key(record: Record, order: str) -> Any:
    """What to sort by; None where a run has no such thing."""
    found = value(record, order)
    if order == "state":
        return states.ALL.index(found) if found in states.ALL else len(states.ALL)
    if isinstance(found, int | float):  # before text: a field may be either
        is_most = order == "step" or (order in (record.get("metrics") or {}) and not aim_of(order).is_least)
        return (0, -found if is_most else found) if math.isfinite(found) else None
    return None if found is None else (1, str(found))

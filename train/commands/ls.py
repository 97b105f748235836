"""`train ls`: list runs."""

from __future__ import annotations

import csv
import fnmatch
import itertools
import json
import math
import sys
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .. import screen
from ..errors import EXIT_FINISHED, Refused, nearest
from ..launcher import tmux
from ..monitor.status import RunStatus, find_best, look_at
from ..run import best, states
from ..run.record import FORMAT, Record
from ..run.run_folder import Run
from ..sweeps import kept
from ..sweeps.kept import Metric, Row
from ..views.listing import BEST, COLUMNS, OWN, listing, value
from ..views.sweep import as_csv, as_json, compared, of_sweep, table
from .completion_values import words
from .options import add_json, add_names, matching
from .parser import Parser, number

_ORDERS = ("created", "name", "state", "step")
"""Orders of --sort besides fields and metrics: oldest first, alphabetical, by state, most steps first."""


EXAMPLES = {
    "train ls": "List all runs, the oldest first.",
    "train ls 'exp-*' --state running,interrupted": "List the runs of these names that are in one of two states.",
    "train ls lr": "Compare the trials of the sweep lr. Without names, train ls shows a sweep as one line.",
    "train ls 'x*' --by optim.lr": "Mean and deviation of the loss over runs with the same rate.",
    "train ls --columns name,optim.lr,accuracy --sort accuracy -n 5": (
        "Compare the five best runs: a config field beside a metric."
    ),
}


def add_arguments(parser: Parser) -> None:
    """Add the choice of runs, the columns and the order."""
    parser.epilog = (
        "states:\n"
        "  checking     its launch is still being checked; train stop NAME ends it\n"
        "  created      about to start\n"
        "  queued       waits for GPUs, cores, other runs or its cluster\n"
        "  running      trains, or waits for other machines\n"
        "  stopped      saved and stopped; train resume NAME continues it\n"
        "  interrupted  its processes died; a keeper or train resume NAME continues it\n"
        "  copy         came from elsewhere, or was copied, edited or renamed by hand;\n"
        "               only train resume NAME continues it\n"
        "  failed       ended by an error; train show NAME tells which\n"
        "  finished     trained to the end\n"
        "  other-format written by another version of train; ls, show, logs and rm work"
    )
    add = parser.add_argument
    add_names(parser, "*")
    text = f"Only runs in these states, with commas: {', '.join(states.ALL)}."
    add("--state", metavar="STATE", help=text, offer=words(*states.ALL))
    text = (
        "Columns of the table, with commas: name, state, step, ranks, created, started, result, owner, user, machine, "
        "gpus, waits_for, args (of a script), restarts, seconds_lost, size (of the folder); config fields (optim.lr); "
        "metrics of the last evaluation (accuracy); their best values (best.accuracy, best.min:wer)."
    )
    add("--columns", metavar="NAMES", help=text)
    text = (
        "created (default), step and size (most first), a metric or best.METRIC (best first), or any other column. "
        "Whether lower is better: as these runs say in checkpoint.best, early_stopping.metric or schedule.metric; a "
        "loss, too."
    )
    add("--sort", metavar="BY", default="created", help=text, offer=words(*_ORDERS, "loss"))
    add("--reverse", action="store_true", help="Reverse the order.")
    text = "Show at most N runs: the newest ones, or with --sort the first ones."
    add("-n", "--limit", metavar="N", help=text)
    text = "Compare runs with equal values of these fields, with commas: number, mean and deviation of a metric."
    add("--by", metavar="FIELDS", help=text)
    text = "The metric of --by and of the table of a sweep: accuracy, min:wer, last:accuracy. Default: theirs."
    add("--metric", metavar="NAME", help=text)
    add("--csv", action="store_true", help="Print comma-separated values.")
    add_json(parser)


def run(options: Namespace, runs: Path) -> int:
    """Print a table, CSV or JSON."""
    if options.json and (options.csv or options.columns is not None):
        raise Refused("--json prints everything about a run; leave out --csv and --columns")
    limit = number("limit", options.limit, 1)
    if (comparison := _compared(options, runs)) is not None:
        _print_compared(options, *comparison)
        return EXIT_FINISHED
    launching = _launching(runs, options.names or ["*"])
    names = [name for name in options.names if name not in launching] if options.names else ["*"]
    chosen = matching(runs, names, must=False)
    if _is_sweep(options, runs):
        chosen = kept.own_runs(chosen[0])
    found = look_at(chosen, screen.remark)
    if not options.names:  # one line per sweep
        sweeps = {one.sweep: kept.find(one.run) for one in found if one.sweep}
        found = [one for one in found if (sweep := sweeps.get(one.trial_of)) is None or one.name not in sweep.trials]
    found += [RunStatus(Run(runs / name), record) for name, record in launching.items()]
    is_part = bool(options.names or found)
    columns = tuple(map(str.strip, options.columns.split(","))) if options.columns is not None else COLUMNS
    if options.json or options.columns is not None or options.sort not in _ORDERS:
        named = [name.removeprefix(BEST) for name in (*columns, options.sort) if name.startswith(BEST)]
        texts = [name for name in named if name.startswith(("min:", "max:"))]
        find_best((one for one in found if one.state != states.OTHER_FORMAT), texts)
    _check_names("--columns", columns, found)
    _check_names("--sort", (options.sort,), found)
    if options.state is not None:
        found = in_states(options.state, found)
    found = _ordered(found, options.sort, limit, options.reverse)
    if options.csv:
        rows = [columns, *([value(one, column, repr) for column in columns] for one in found)]
        plain = ([screen.printable(one) if isinstance(one, str) else one for one in row] for row in rows)
        csv.writer(sys.stdout, lineterminator="\n").writerows(plain)
    elif options.json:
        print(json.dumps([_as_json(one) for one in found], indent=1, default=str))
    else:
        print(listing(found, runs=runs, is_part=is_part, columns=columns))
    return EXIT_FINISHED


def _is_sweep(options: Namespace, runs: Path) -> bool:
    """Whether the only name is that of a sweep."""
    return len(options.names) == 1 and (runs / options.names[0] / kept.FILE).exists()


def _compared(options: Namespace, runs: Path) -> tuple[list[Row], Metric] | None:
    """Return the rows of a sweep, or of runs that are compared --by fields, and by what; None: runs are listed."""
    lists = [options.columns, options.state, options.limit, None if options.sort == "created" else options.sort]
    is_list = options.reverse or any(one is not None for one in lists)
    if is_list and (options.by is not None or options.metric is not None):
        raise Refused("--by and --metric compare runs; leave out --columns, --sort, --reverse, --state and --limit")
    chosen = matching(runs, options.names or ["*"], must=False) if options.by is not None else []
    if options.by is None and _is_sweep(options, runs):
        chosen = matching(runs, options.names)
    sweep = kept.read(chosen[0]) if _is_sweep(options, runs) and chosen else None
    if options.by is None and (sweep is None or is_list):
        if options.metric is not None:
            raise Refused("--metric is for the table of a sweep, and for --by; give --sort, or the name of a sweep")
        return None
    if sweep is not None and options.by is None:
        return of_sweep(chosen[0], options.metric or "")
    found = look_at(kept.own_runs(chosen[0]) if sweep is not None else chosen, screen.remark)
    found = [one for one in found if not one.sweep and one.state != states.OTHER_FORMAT]
    aims = (one.config.get("checkpoint.best") for one in found)
    metric = kept.Metric.read(options.metric or next((str(aim) for aim in aims if aim), "loss"))
    return compared(found, [*map(str.strip, options.by.split(","))], metric), metric


def _print_compared(options: Namespace, rows: list[Row], metric: Metric) -> None:
    if options.csv:
        csv.writer(sys.stdout, lineterminator="\n").writerows(as_csv(rows, metric))
    elif options.json:
        print(json.dumps(as_json(rows, metric), indent=1))
    else:
        print(table(rows, metric))


def _as_json(one: RunStatus) -> dict[str, Any]:
    """Return a run with its configuration, the metrics of its last evaluation, and their best values."""
    if one.state == states.OTHER_FORMAT:
        return one.to_json()
    return {**one.to_json(), "config": one.config, "metrics": one.metrics, "best": one.best}


def _launching(runs: Path, names: list[str]) -> dict[str, Record]:
    """Return the records of runs of these names whose launch is still being checked, by name."""
    return {
        name: {
            "format": FORMAT, "name": name, "state": states.CHECKING, "created": began, "started": None, "step": 0,
            "epoch": 0, "attempts": [], "stopped_by": None,
            "reason": f"its launch is being checked; end it: train stop {name}",
        }
        for name, began in tmux.checking(runs).items()
        if any(fnmatch.fnmatchcase(name, given) for given in names)
    }  # fmt: skip


def _check_names(option: str, names: tuple[str, ...], found: list[RunStatus]) -> None:
    """Check that at least one of these runs has each column or order. Raises Refused."""
    own = {*COLUMNS, *_ORDERS, *OWN, "loss"}
    if not found or own.issuperset(names):
        return
    parts: Iterable[Any] = ((one.metrics, one.record.get("last_figures") or {}, one.config) for one in found)
    known = own | {*itertools.chain.from_iterable(itertools.chain.from_iterable(parts))}
    known |= {f"{BEST}{name}" for one in found for name in one.best}
    for name in names:
        if name not in known:
            hint = nearest(name, known, otherwise="; see: train ls --help")
            raise Refused(f"{option} {name}: no run here has this column{hint}")
        metric = name.removeprefix(BEST)
        if metric != name and best.aim_among(metric, [one.config for one in found]) is None:
            raise Refused(
                f"{option} {name}: these runs disagree whether lower is better; give {BEST}min:{metric} or "
                f"{BEST}max:{metric}"
            )


def in_states(wanted: str, found: list[RunStatus]) -> list[RunStatus]:
    """Return the runs in one of these states, given with commas. Raises Refused for an unknown state."""
    among = [state.strip() for state in wanted.split(",")]
    for state in among:
        if state not in states.ALL:
            raise Refused(f"--state {state}: must be one of {', '.join(states.ALL)}{nearest(state, states.ALL)}")
    return [one for one in found if one.state in among]


def _ordered(found: list[RunStatus], order: str, limit: int | None, reverse: bool) -> list[RunStatus]:
    """Return these runs, given oldest first, in another order. Runs without a value come last.

    Args:
        order: one of _ORDERS, a config field (smallest first), or a metric (best first).
        limit: maximum number of runs: the newest ones for `created`, otherwise the first ones.
    """
    if order == "created":
        found = found[-limit if limit else 0 :]
        return found[::-1] if reverse else found
    text, configs = order.removeprefix(BEST), [one.config for one in found if order not in _ORDERS]
    aim = best.aim_among(text, configs) or best.aim_of(text)
    keys = [(_key(one, order, aim.is_least), one) for one in found]
    known = sorted((pair for pair in keys if pair[0] is not None), key=lambda pair: pair[0], reverse=reverse)
    return [one for _, one in [*known, *(pair for pair in keys if pair[0] is None)]][:limit]


def _key(one: RunStatus, order: str, is_least: bool) -> Any:
    """Return the sort key of a run; None if the run has no such value. `is_least`: whether lower is better."""
    found = value(one, order)
    if order == "state":
        return states.ALL.index(found) if found in states.ALL else len(states.ALL)
    if isinstance(found, int | float):  # tested before text, because a field may be either
        is_metric = order.startswith(BEST) or order in one.metrics
        is_most = order in ("step", "size") or (is_metric and not is_least)
        return (0, -found if is_most else found) if math.isfinite(found) else None
    return None if found is None else (1, str(found))

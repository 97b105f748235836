"""`train ls`: the runs there are."""

from __future__ import annotations

import csv
import json
import sys
from argparse import Namespace
from pathlib import Path

from train import screen
from train.cluster import jobs
from train.commands import choose_runs
from train.commands.completion_values import words
from train.commands.options import add_json, add_names
from train.commands.parser import Parser, number
from train.errors import EXIT_FINISHED, Refused
from train.run import folders, states


def add_arguments(parser: Parser) -> None:
    """Which ones, and in which order."""
    add = parser.add_argument
    add_names(parser, "*")
    text = "only these, with commas: running, stopped, interrupted, copy, failed, …"
    add("--state", metavar="STATE", help=text, offer=words(*states.ALL))
    text = "created (the default), step (most first), a figure (the best first), or whatever --columns takes"
    add("--sort", metavar="BY", help=text, offer=words(*choose_runs.ORDERS, "loss"))
    text = "with commas: name, state, step, ranks, created, started, result; fields (optim.lr); figures (accuracy)"
    add("--columns", metavar="NAMES", help=text)
    add("--csv", action="store_true", help="the table as comma-separated values")
    add("--reverse", action="store_true", help="the other way round")
    add("-n", "--limit", metavar="N", help="at most so many: the newest, or with --sort the first ones")
    add_json(parser)


def run(options: Namespace, runs: Path) -> int:
    """Print a table, or JSON."""
    from train.views.listing import COLUMNS, listing, value

    if options.json and (options.csv or options.columns is not None):
        raise Refused("--json prints all there is of a run; leave out --csv and --columns")
    limit = number("limit", options.limit, 1)
    names = options.names
    found = choose_runs.matching(runs, names, must=False) if names else folders.every(runs)
    records = jobs.statuses(found, screen.remark)
    known = bool(records) and not names
    columns = tuple(map(str.strip, options.columns.split(","))) if options.columns is not None else COLUMNS
    if options.json or options.columns is not None or options.sort not in (None, *choose_runs.ORDERS):
        choose_runs.add_details(records, runs)
    choose_runs.check_names("--columns", columns, records)
    records = choose_runs.chosen(records, options.state, options.sort, limit, options.reverse)
    if options.csv:
        rows = [[value(record, column) for column in columns] for record in records]
        csv.writer(sys.stdout, lineterminator="\n").writerows([columns, *rows])
    else:
        is_part = bool(names) or known
        print(json.dumps(records, indent=1, default=str) if options.json else listing(records, runs, is_part, columns))
    return EXIT_FINISHED

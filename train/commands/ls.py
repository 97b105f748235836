"""`train ls`: the runs there are."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from train import screen
from train.cluster import jobs
from train.commands import choose_runs
from train.commands.completion_values import words
from train.commands.options import add_json, add_names
from train.commands.parser import Parser, number
from train.errors import EXIT_FINISHED
from train.run import folders, states


def add_arguments(parser: Parser) -> None:
    """Which ones, and in which order."""
    add = parser.add_argument
    add_names(parser, "*")
    text = "only these, with commas: running, stopped, interrupted, copy, failed, …"
    add("--state", metavar="STATE", help=text, offer=words(*states.ALL))
    text = "created (the default), name, state, step (most first), loss (lowest first)"
    add("--sort", metavar="BY", help=text, offer=words(*choose_runs.ORDERS))
    add("--reverse", action="store_true", help="the other way round")
    add("-n", "--limit", metavar="N", help="at most so many: the newest, or with --sort the first ones")
    add_json(parser)


def run(options: Namespace, runs: Path) -> int:
    """Print a table, or JSON."""
    from train.views.listing import listing

    limit = number("limit", options.limit, 1)
    names = options.names
    found = choose_runs.matching(runs, names, must=False) if names else folders.every(runs)
    records = jobs.statuses(found, screen.remark)
    known = bool(records) and not names
    records = choose_runs.chosen(records, options.state, options.sort, limit, options.reverse)
    print(json.dumps(records, indent=1) if options.json else listing(records, runs, bool(names) or known))
    return EXIT_FINISHED

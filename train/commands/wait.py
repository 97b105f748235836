"""`train wait`: wait until runs have ended."""

from __future__ import annotations

import math
from argparse import Namespace
from pathlib import Path

from .options import add_names, matching
from .parser import Parser, decimal

_LONGEST = 1e9
"""Seconds; about thirty years."""

EXAMPLES = {
    "train wait demo1 && train eval demo1": "Evaluate the run once it has finished.",
    "train wait 'exp-*' --timeout 3600": "Wait up to one hour until these runs have ended.",
}


def add_arguments(parser: Parser) -> None:
    """Add the runs and --timeout."""
    parser.epilog = (
        "exit codes:\n"
        "  0    all runs have finished\n"
        "  3    a run has failed or was interrupted\n"
        "  75   none of these, but a run was stopped\n"
        "  124  the time is over\n"
        "A run that restarts, or that a keeper resumes within 10 minutes, has not ended."
    )
    add_names(parser, "+")
    text = "Wait at most this many seconds. The runs continue. Default: no limit."
    parser.add_argument("--timeout", metavar="S", help=text)


def run(options: Namespace, runs: Path) -> int:
    """Print a line as each run ends. Return the worst of their exit codes."""
    from ..views.wait import wait

    limit = math.inf if options.timeout is None else decimal("timeout", options.timeout, 0, _LONGEST)
    return wait(matching(runs, options.names), limit)

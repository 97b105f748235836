"""`train gpus`: who holds which GPU of this machine."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

from .. import screen
from ..errors import EXIT_FINISHED
from ..format import size
from ..leases import devices, locks
from ..monitor import machine
from .options import add_json
from .parser import Parser

EXAMPLES = {
    "train gpus": "Show each GPU, its use, and the run that holds it. Without GPUs: the cores.",
    "train gpus --json": "The same for programs.",
}


def add_arguments(parser: Parser) -> None:
    """Add the output for programs."""
    add_json(parser)


def run(options: Namespace, runs: Path) -> int:
    """Print a table or JSON: of all stations and users of this machine."""
    try:
        found = machine.held()
    except locks.Unusable as problem:
        raise locks.refuse(problem) from None
    if options.json:
        print(json.dumps(found, indent=1))
        return EXIT_FINISHED
    heads = ["GPU", "NAME", "USE", "MEMORY"] if "gpu" in found[0] else ["CORE"]
    rows = [[*heads, "HOLDER", "RUN", "SINCE"]]
    for one in found:
        first = [str(one["core"])]
        if "gpu" in one:
            use = "-" if one["use"] is None else f"{100 * one['use']:.0f} %"
            memory = f"{size(one['memory_used'] or 0)} of {size(one['memory'])}" if one["memory"] else "-"
            first = [str(one["gpu"]), one["name"], use, memory]
        since = devices.clock(one["since"]) or (f"{one['other']}, without a lease" if one.get("other") else "-")
        rows.append([*first, one["user"] or "-", one["run"] or "-", since])
    print(screen.table([[screen.printable(cell) for cell in row] for row in rows], screen.width(sys.stdout), spare=()))
    return EXIT_FINISHED

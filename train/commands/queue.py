"""`train queue`: which runs of this machine wait for GPUs or cores, in order."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from argparse import Namespace
from pathlib import Path

from .. import screen
from ..errors import EXIT_FINISHED, of_system
from ..format import ago
from ..leases import locks, tickets
from ..run.run_folder import seconds_of
from .options import add_json
from .parser import Parser

EXAMPLES = {
    "train queue": "Show which runs wait, of all users and stations of this machine.",
    "train queue --json": "The same for programs. To take a run of yours out: train stop NAME.",
}


def add_arguments(parser: Parser) -> None:
    """Add the output for programs."""
    add_json(parser)


def run(options: Namespace, runs: Path) -> int:
    """Print a table or JSON, each kind of device in its own order."""
    try:
        found = sorted(tickets.waiting(), key=lambda one: one.kind)
    except locks.Unusable as problem:
        raise locks.refuse(problem) from None
    except OSError as error:
        raise locks.refuse(locks.Unusable(of_system(error))) from None
    places: dict[str, int] = {}
    lines = []
    for one in found:
        places[one.kind] = places.get(one.kind, 0) + 1
        lines.append(
            {"place": places[one.kind], "kind": one.kind, **dataclasses.asdict(one.holder), "user": one.holder.who}
        )
    if options.json:
        print(json.dumps(lines, indent=1))
    elif not lines:
        print("no run waits in the queue; start one that does: train launch TASK --queue")
    else:
        rows = [["PLACE", "RUN", "USER", "WANTS", "WAITS SINCE"]]
        for line in lines:
            began = seconds_of(line["since"])
            since = ago(time.time() - began) if began else "-"
            rows.append([str(line["place"]), line["run"], line["user"], line["wants"], since])
        print(
            screen.table([[screen.printable(cell) for cell in row] for row in rows], screen.width(sys.stdout), spare=())
        )
    return EXIT_FINISHED

"""`train queue`: which runs of this machine wait for GPUs or cores, in order, and which wait for other runs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from .. import screen
from ..errors import EXIT_FINISHED, Refused, of_system
from ..format import ago
from ..leases import locks, tickets
from ..leases.locks import Holder
from ..monitor.status import here
from ..run import folders, states
from ..run.run_folder import seconds_of
from .options import add_json
from .parser import Parser

EXAMPLES = {
    "train queue": "Show which runs wait for GPUs or cores, of all users and stations of this machine.",
    "train queue --json": "The same for programs. To take a run of yours out: train stop NAME.",
}


def add_arguments(parser: Parser) -> None:
    """Add the output for programs."""
    parser.epilog = "Runs in --runs that wait for other runs (--after) come last, without a place."
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
        lines.append(_line(one.holder, place=places[one.kind], kind=one.kind, after=[]))
    lines += _of_after(runs)
    if options.json:
        print(json.dumps(lines, indent=1))
    elif not lines:
        print("no run waits in the queue; start one that does: train launch TASK --queue")
    else:
        rows = [["PLACE", "RUN", "USER", "WAITS FOR", "SINCE"]]
        for line in lines:
            began = seconds_of(line["since"])
            since = ago(time.time() - began) if began else "-"
            place = "-" if line["place"] is None else str(line["place"])
            rows.append([place, line["run"], line["user"], ", ".join(line["after"]) or line["wants"], since])
        print(
            screen.table([[screen.printable(cell) for cell in row] for row in rows], screen.width(sys.stdout), spare=())
        )
    return EXIT_FINISHED


def _line(holder: Holder, **more: Any) -> dict[str, Any]:
    return {**more, "state": states.QUEUED, **dataclasses.asdict(holder), "user": holder.who}


def _of_after(runs: Path) -> list[dict[str, Any]]:
    """Return the runs of this folder that wait for other runs, oldest first."""
    found = []
    for run in folders.every(runs):
        with contextlib.suppress(Refused, OSError):  # it is damaged, or removed meanwhile
            one = here(run)
            if one.state == states.QUEUED and (after := one.record.get("after")):
                holder = Holder(user=one.user, run=one.name, station=one.machine)
                found.append(_line(holder, place=None, kind="", after=after))
    return found

"""`train gpus`: who holds which GPU of this machine."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from .. import gpus, screen
from ..build import cores
from ..errors import EXIT_FINISHED
from ..format import size
from ..leases import devices, locks
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
        locks.folder()
    except locks.Unusable as problem:
        raise locks.refuse(problem) from None
    found = _of_gpus() or _of_cores()
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


def _of_gpus() -> list[dict[str, Any]]:
    found = []
    for state in gpus.Gpus().read():
        holder = devices.of_gpu(state.uuid, state.number).holder()
        other = gpus.foreign_use(state.uuid) if holder is None else ""
        found.append({
            "gpu": state.number, "uuid": state.uuid, "name": state.name, "use": state.use,
            "memory_used": state.memory_used, "memory": state.memory_size, **_who(holder), "other": other,
        })  # fmt: skip
    return found


def _of_cores() -> list[dict[str, Any]]:
    every = enumerate(devices.cores_here(cores.usable()))
    return [{"core": number, **_who(device.holder())} for number, device in every]


def _who(holder: locks.Holder | None) -> dict[str, str]:
    one = holder or locks.Holder()
    return {"user": one.who if holder else "", "run": one.run, "since": one.since, "station": one.station}

"""`train bench`: what this machine can do."""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from train.commands.parser import Parser, number
from train.commands.shared import add_nodes, nodes_of
from train.errors import EXIT_FINISHED, Refused

SUBJECTS = {
    "checkpoint": 5,
    "collective": 20,
    "exporter": 50,
    "input": 10,
    "loop": 5,
    "ordered": 30,
    "recovery": 5,
    "resume": 25,
    "scaling": 20,
    "start": 5,
    "stop": 200,
}
"""What can be measured, each by the function `bench` of a module of its name, and how often by default."""

_STRATEGIES = ("dp", "ddp", "fsdp", "hsdp")
_TAKEN_BY = {
    "device": ("checkpoint",), "every": ("recovery",), "mb": ("checkpoint",), "nproc": ("collective", "scaling"),
    "steps": ("recovery",),
}  # fmt: skip
"""Flags that some subjects take."""


def add_arguments(parser: Parser) -> None:
    """What to measure, how large and how often."""
    add = parser.add_argument
    add("subject", metavar="|".join(SUBJECTS), choices=tuple(SUBJECTS), help="what to measure")
    add("--mb", metavar="N", action="append", help="checkpoint: MB of state; may be repeated (100, 1000)")
    text = "checkpoint: where the state lies that is saved (cpu)"
    add("--device", choices=("cpu", "cuda"), help=text)
    text = "loop, scaling: what is trained (mlp: a perceptron); resnet50 in scaling alone"
    add("--model", choices=("mlp", "resnet18", "resnet50"), default="mlp", help=text)
    text = "collective: how many ranks (the GPUs, or 2 on the CPU); scaling: a list, as in 1,2,4, or with --nnodes the "
    text += "ranks of each machine"
    add("--nproc", metavar="N", help=text)
    add("--strategies", metavar="A,B", help="scaling: of dp, ddp, fsdp, hsdp (dp,ddp,fsdp)")
    add("--to", metavar="FILE", help="scaling: a picture of it, .png, .svg or .pdf")
    add("--json", action="store_true", help="scaling: for machines")
    add_nodes(parser)
    add("--pictures", metavar="N", default="256", help="input: how many JPEG files (256)")
    text = "resume: size of the virtual data set (1000000000)"
    add("--samples", metavar="N", default="1000000000", help=text)
    add("--every", metavar="S", help="recovery: kill a rank every S seconds (one a run, in its middle)")
    add("--steps", metavar="N", help="recovery: how many steps a run has (1000)")
    usual = ", ".join(f"{subject} {times}" for subject, times in SUBJECTS.items())
    add("--times", metavar="N", help=f"repetitions; medians are shown ({usual})")


def run(options: Namespace, runs: Path) -> int:
    """Measure and print a table."""
    times = number("times", options.times, 1) or SUBJECTS[options.subject]
    own = _own(options)
    made = [folder for folder in (runs, *runs.parents) if not folder.exists()]
    runs.mkdir(parents=True, exist_ok=True)
    module = importlib.import_module(f"train.bench.{options.subject}")
    for kind in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C does, they leave nothing behind
        signal.signal(kind, lambda at, _: sys.exit(128 + at))
    try:
        print(module.bench(runs, times=times, **own))
    except (Refused, KeyboardInterrupt, SystemExit):
        with contextlib.suppress(OSError):  # somebody else has something there by now
            for folder in made:
                folder.rmdir()
        raise
    return EXIT_FINISHED


def _own(options: Namespace) -> dict[str, Any]:
    """What a subject alone takes.

    Raises:
        Refused: it makes no sense.
    """
    subject = options.subject
    if options.model == "resnet50" and subject != "scaling":
        raise Refused(f"--model resnet50 is for scaling, not {subject}; use mlp or resnet18")
    if subject != "scaling" and (options.strategies or options.to is not None or options.json):
        raise Refused(f"--strategies, --to and --json are for train bench scaling, not {subject}; leave them out")
    if subject != "scaling" and (options.nnodes or options.node_rank or options.rendezvous or options.wait_minutes):
        raise Refused(f"--nnodes is for train bench scaling, not {subject}; leave it out")
    for name, takers in _TAKEN_BY.items():
        if getattr(options, name) is not None and subject not in takers:
            raise Refused(f"--{name} is for train bench {' and '.join(takers)}, not {subject}; leave it out")
    match subject:
        case "checkpoint":
            megabytes = [number("mb", text, 1) or 1 for text in options.mb or ["100", "1000"]]
            return {"megabytes": megabytes, "device": options.device or "cpu"}
        case "collective":
            return {"ranks": number("nproc", options.nproc, 2)}
        case "input":
            return {"pictures": number("pictures", options.pictures, 1)}
        case "loop":
            return {"name": options.model}
        case "recovery":
            steps, every = number("steps", options.steps, 50) or 1000, number("every", options.every, 1)
            return {"steps": steps, "every": every}
        case "resume":
            return {"samples": number("samples", options.samples, 100_000)}
        case "scaling":
            return _scaling(options)
    return {}


def _scaling(options: Namespace) -> dict[str, Any]:
    ranks = [number("nproc", text, 1) or 1 for text in options.nproc.split(",")] if options.nproc is not None else []
    names = options.strategies.split(",") if options.strategies is not None else []
    for name in names:
        if name not in _STRATEGIES:
            known = ", ".join(_STRATEGIES)
            raise Refused(f"--strategies {options.strategies}: {name or 'an empty name'} is none of {known}")
    cluster = _machines(options, ranks, names)
    to = Path(options.to) if options.to is not None else None
    if to is not None:
        from train.record import plot, target

        target.check(to, plot.SUFFIXES)
    return {
        "name": options.model,
        "strategies": list(dict.fromkeys(names)),
        "ranks": ranks,
        "as_json": options.json,
        "to": to,
        "cluster": cluster,
    }


def _machines(options: Namespace, ranks: list[int], strategies: list[str]) -> dict[str, Any] | None:
    """The machines that measure together, as bench/meeting.py has them.

    Raises:
        Refused: they cannot.
    """
    found = nodes_of(options)
    if not found:
        return None
    if found["least"] != found["most"]:
        raise Refused(f"--nnodes {options.nnodes}: a measurement takes one number of machines; give it")
    if len(ranks) > 1:
        raise Refused(f"--nproc {options.nproc}: with --nnodes it is the ranks of each machine; give one number")
    if "dp" in strategies:
        raise Refused("--strategies dp: nn.DataParallel is one process on one machine; leave it out, or --nnodes")
    kept = {name: found[name] for name in ("node", "rendezvous", "wait_minutes")}
    return {"nodes": found["most"], **kept}

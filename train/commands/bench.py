"""`train bench`: what this machine can do."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from train.commands.completion_values import task_names
from train.commands.options import add_target, check_now
from train.commands.parser import Parser, number
from train.errors import EXIT_FINISHED, Refused
from train.parallel.rank_env import is_under_torchrun

SUBJECTS = {"checkpoint": 5, "collective": 20, "input": 10, "lr": 100, "scaling": 20}
"""What can be measured, each by the function `bench` of a module of its name, and how often by default."""

_STRATEGIES = ("ddp", "fsdp", "hsdp")
_TAKEN_BY = {
    "config": ("lr",), "json": ("scaling",), "mb": ("checkpoint",), "model": ("scaling",),
    "nproc": ("collective", "scaling"), "pictures": ("input",), "strategies": ("scaling",), "task": ("lr",),
    "to": ("lr",),
}  # fmt: skip
"""Flags that some subjects take."""


def add_arguments(parser: Parser) -> None:
    """What to measure, how large and how often."""
    parser.takes_fields = True  # of lr; checkpoint takes --device
    add = parser.add_argument
    text = "what to measure; collective and scaling over several machines: torchrun … -m train bench"
    add("subject", metavar="|".join(SUBJECTS), choices=tuple(SUBJECTS), help=text)
    add("task", metavar="TASK", nargs="?", help="lr: whose learning rate is searched", offer=task_names)
    add("--config", metavar="FILE", help="lr: TOML file with fields; flags win over it")
    add_target(parser, ".png", ".svg", ".pdf", required=False)
    add("--mb", metavar="N", action="append", help="checkpoint: MB of state; may be repeated (100, 1000)")
    text = "scaling: what is trained (mlp: a perceptron)"
    add("--model", choices=("mlp", "resnet18", "resnet50"), help=text)
    text = "collective: how many ranks (the GPUs, or 2 on the CPU); scaling: a list, as in 1,2,4"
    add("--nproc", metavar="N", help=text)
    add("--strategies", metavar="A,B", help="scaling: of ddp, fsdp, hsdp (ddp,fsdp)")
    add("--json", action="store_const", const=True, help="scaling: for machines")
    add("--pictures", metavar="N", help="input: how many JPEG files (256)")
    usual = ", ".join(f"{subject} {times}" for subject, times in SUBJECTS.items())
    add("--times", metavar="N", help=f"repetitions, of which medians are shown, or steps of lr ({usual})")


def run(options: Namespace, runs: Path) -> int:
    """Measure and print a table."""
    times = number("times", options.times, 1) or SUBJECTS[options.subject]
    own = _own(options, runs)
    made = [folder for folder in (runs, *runs.parents) if not folder.exists()]
    runs.mkdir(parents=True, exist_ok=True)
    module = importlib.import_module(f"train.bench.{options.subject}")
    for kind in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C does, they leave nothing behind
        signal.signal(kind, lambda at, _: sys.exit(128 + at))
    try:
        text = module.bench(runs, times=times, **own)
    except (Refused, KeyboardInterrupt, SystemExit):
        with contextlib.suppress(OSError):  # another program has files there by now
            for folder in made:
                folder.rmdir()
        raise
    if os.environ.get("RANK", "0") == "0":  # under torchrun all ranks measure, and one tells
        print(text)
    return EXIT_FINISHED


def _own(options: Namespace, runs: Path) -> dict[str, Any]:
    """The arguments of one subject. Raises Refused for those of another."""
    subject = options.subject
    for name, takers in _TAKEN_BY.items():
        if getattr(options, name) is not None and subject not in takers:
            given = name if name == "task" else f"--{name}"
            raise Refused(f"{given} is for train bench {' and '.join(takers)}, not {subject}; leave it out")
    for name in options.flags:
        if subject != "lr" and (subject, name) != ("checkpoint", "device"):
            raise Refused(f"--{name} is for train bench lr, not {subject}; leave it out")
    if options.nproc is not None and is_under_torchrun():
        raise Refused("--nproc: torchrun says how many ranks there are; leave it out, or torchrun")
    match subject:
        case "checkpoint":
            megabytes = [number("mb", text, 1) or 1 for text in options.mb or ["100", "1000"]]
            return {"megabytes": megabytes, "device": _device(options.flags)}
        case "collective":
            return {"ranks": number("nproc", options.nproc, 2)}
        case "input":
            return {"pictures": number("pictures", options.pictures, 1) or 256}
        case "lr":
            if options.task is None or options.to is None:
                raise Refused("train bench lr needs a task and --to FILE.png")
            request = {"task": options.task, "flags": options.flags, "config_file": options.config}
            check_now(request, runs)
            from train.launcher.request import Request

            return {"request": Request(**request), "target": Path(options.to)}
    ranks = [number("nproc", text, 1) or 1 for text in options.nproc.split(",")] if options.nproc is not None else []
    names = options.strategies.split(",") if options.strategies is not None else []
    for name in names:
        if name not in _STRATEGIES:
            known = ", ".join(_STRATEGIES)
            raise Refused(f"--strategies {options.strategies}: {name or 'an empty name'} is none of {known}")
    return {
        "name": options.model or "mlp", "strategies": list(dict.fromkeys(names)), "ranks": ranks,
        "as_json": options.json is not None,
    }  # fmt: skip


def _device(flags: dict[str, str]) -> str:
    device = flags.get("device", "cpu")
    if device not in ("cpu", "cuda"):
        raise Refused(f"--device {device}: must be cpu or cuda")
    return device

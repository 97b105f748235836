"""`train bench`: measure this machine."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from .. import screen
from ..errors import EXIT_FINISHED, Refused
from ..parallel.rank_env import is_under_torchrun
from .completion_values import task_names
from .options import add_target, check_now, request_of
from .parser import Parser, number

SUBJECTS = {"checkpoint": 5, "collective": 20, "input": 10, "lr": 100, "scaling": 20}
"""Maps a subject to its default of --times. The function `bench` of train/bench/SUBJECT.py measures it."""

_TAKEN_BY = {
    "config": ("lr",), "json": ("scaling",), "mb": ("checkpoint",), "model": ("scaling",),
    "nproc": ("collective", "scaling"), "pictures": ("input",), "strategies": ("scaling",), "task": ("lr",),
    "to": ("lr",),
}  # fmt: skip
"""Maps a flag to the subjects that take it."""


EXAMPLES = {
    "train bench checkpoint": "How long a save stalls training, compared with torch.save and the disk.",
    "train bench collective --nproc 2": "How fast ranks add up tensors, compared with the speed of their link.",
    "train bench input": "Images per second of one core, from JPEG to batch, compared with torchvision.",
    "train bench lr digits --to lr.png": "Draw the loss while the learning rate rises, to choose a learning rate.",
    "train bench scaling --nproc 1,2": "The gain by more ranks with ddp and fsdp, compared with a hand-written loop.",
}


def add_arguments(parser: Parser) -> None:
    """Add the subject and the options of each subject."""
    parser.takes_fields = True  # lr takes all of them, checkpoint takes --device
    parser.usage = "train bench SUBJECT [--FLAG VALUE ...]\n       train bench lr TASK --to FILE [--FLAG VALUE ...]"
    add = parser.add_argument
    text = f"What to measure: {', '.join(SUBJECTS)}."
    add("subject", metavar="SUBJECT", choices=tuple(SUBJECTS), help=text)
    add("task", metavar="TASK", nargs="?", help="Only for lr: a built-in task or a Python file.", offer=task_names)
    usual = ", ".join(f"{subject} {times}" for subject, times in SUBJECTS.items())
    add("--times", metavar="N", help=f"Repetitions; the median is shown. For lr: steps. Default: {usual}.")
    text = "Megabytes of state; may be repeated. Default: 100 and 1000. (Also takes --device.)"
    add("--mb", metavar="N", action="append", section="options of checkpoint", help=text)
    text = (
        "Number of ranks; for scaling a list: 1,2,4. Default: up to one per GPU, or 2 on the CPU. "
        "On several machines use torchrun ... -m train bench SUBJECT, without --nproc."
    )
    add("--nproc", metavar="N", section="options of collective and scaling", help=text)
    only = "options of scaling"
    models = ("mlp", "resnet18", "resnet50")
    text = "Model to train. Default: mlp, a perceptron."
    add("--model", choices=models, metavar="|".join(models), section=only, help=text)
    add("--strategies", metavar="A,B", section=only, help="Strategies to compare. Default: ddp,fsdp.")
    add("--json", action="store_const", const=True, section=only, help="Print JSON, for programs.")
    add("--pictures", metavar="N", section="options of input", help="Number of JPEG files. Default: 256.")
    only = "options of lr (it also takes all config fields below)"
    add_target(parser, ".png", ".svg", ".pdf", required=False, section=only)
    parser.fields_section = only
    add("--config", metavar="FILE", section=only, help="TOML file with config fields. Flags win over the file.")


def run(options: Namespace, runs: Path) -> int:
    """Measure, and print a table."""
    times = number("times", options.times, 1) or SUBJECTS[options.subject]
    own = _own(options, runs)
    made = [folder for folder in (runs, *runs.parents) if not folder.exists()]
    runs.mkdir(parents=True, exist_ok=True)
    module = importlib.import_module(f"..bench.{options.subject}", __package__)
    for kind in (signal.SIGTERM, signal.SIGHUP):  # like Ctrl-C, they must leave nothing behind
        signal.signal(kind, lambda at, _: sys.exit(128 + at))
    try:
        text = module.bench(runs, times=times, **own)
    except (Refused, KeyboardInterrupt, SystemExit):
        with contextlib.suppress(OSError):  # another program may have files there by now
            for folder in made:
                folder.rmdir()
        raise
    if os.environ.get("RANK", "0") == "0":  # under torchrun all ranks measure, and rank 0 prints
        print("\n".join(map(screen.printable, text.split("\n"))))
    return EXIT_FINISHED


def _own(options: Namespace, runs: Path) -> dict[str, Any]:
    """Return the arguments of the subject. Raises Refused for an option of another subject."""
    subject = options.subject
    for name, takers in _TAKEN_BY.items():
        if getattr(options, name) is not None and subject not in takers:
            given = name if name == "task" else f"--{name}"
            raise Refused(f"{given} is for train bench {' and '.join(takers)}, not {subject}; leave it out")
    for name in options.flags:
        if subject != "lr" and (subject, name) != ("checkpoint", "device"):
            raise Refused(f"--{name} is for train bench lr, not {subject}; leave it out")
    if options.nproc is not None and is_under_torchrun():
        raise Refused("--nproc: torchrun sets the number of ranks; leave out --nproc")
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
                raise Refused("train bench lr needs a TASK and --to FILE.png; see: train bench --help")
            request = request_of(options)
            check_now(request, runs)
            return {"request": request, "target": Path(options.to)}
    from ..config import strategies

    ranks = [number("nproc", text, 1) or 1 for text in options.nproc.split(",")] if options.nproc is not None else []
    names = options.strategies.split(",") if options.strategies is not None else []
    known = strategies.of_several()
    for name in names:
        if name not in known:
            unknown = name or "an empty name"
            raise Refused(f"--strategies {options.strategies}: {unknown} is not one of {', '.join(known)}")
    return {
        "name": options.model or "mlp", "chosen": list(dict.fromkeys(names)), "ranks": ranks,
        "as_json": options.json is not None,
    }  # fmt: skip


def _device(flags: dict[str, str]) -> str:
    device = flags.get("device", "cpu")
    if device not in ("cpu", "cuda"):
        raise Refused(f"--device {device}: must be cpu or cuda")
    return device

"""`train eval`: evaluate a checkpoint."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

from .. import screen
from ..errors import EXIT_FINISHED
from ..format import figures
from ..launcher import eval_fields
from .options import add_checkpoint, add_json, add_name
from .parser import Parser

EXAMPLES = {
    "train eval demo1": "Evaluate the newest checkpoint on the evaluation sets of the run.",
    "train eval demo1 --checkpoint best --json": "Evaluate the best checkpoint, and print JSON.",
    "train eval demo1 --data.root /mnt/test --task.fold 3 --to test.json": (
        "Evaluate on other data, with another setting of the task, and write a file."
    ),
}


def add_arguments(parser: Parser) -> None:
    """Add the run, the checkpoint, the file and the fields."""
    parser.takes_fields, parser.continues_run, parser.only_fields = True, True, eval_fields.FIELDS
    parser.usage = "train eval NAME [--FLAG VALUE ...]"
    add_name(parser)
    add_checkpoint(parser)
    add_json(parser)
    parser.add_argument("--to", metavar="FILE", help="Write the metrics to this .json file, too.")


def run(options: Namespace, runs: Path) -> int:
    """Evaluate the checkpoint and print the metrics."""
    from .. import programs
    from ..run import best, durable, folders
    from ..run.spec import read_spec

    run = folders.find_trusted(runs, options.name)
    spec, flags = read_spec(run), options.flags
    programs.of(spec).check_can("eval", run.name)
    eval_fields.check(flags)
    if flags.get("data.root"):
        flags["data.root"] = str(Path(flags["data.root"]).absolute())
    target = Path(options.to).absolute() if options.to is not None else None
    if target is not None:
        durable.check_target(target, (".json",))
    wanted = best.checkpoint_named(run, spec, options.checkpoint, tell=screen.remark)
    from ..trainer.evaluate import evaluate_run

    folders.enter(spec.cwd)
    with screen.results_alone():
        change = eval_fields.changing(spec, flags) if flags else None
        step, samples, measured = evaluate_run(run, spec, wanted.step, change=change)
    text = json.dumps({"step": step, "samples": samples, "eval": measured} | ({"fields": flags} if flags else {}))
    if options.json:
        print(text)
    else:
        typed = "".join(f", --{name} {value}" for name, value in flags.items())
        screen.say(f"step {step}{wanted.said}, {samples} samples{typed}: {figures(measured)}", sys.stdout)
    if target is not None:
        durable.write_atomically(target, f"{text}\n")
    return EXIT_FINISHED

"""`train eval`: evaluate a checkpoint."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

from .. import screen
from ..errors import EXIT_FINISHED
from ..format import figures
from .options import add_checkpoint, add_json, add_name
from .parser import Parser

EXAMPLES = {
    "train eval demo1": "Evaluate the newest checkpoint on the evaluation sets of the run.",
    "train eval demo1 --checkpoint best --json": "Evaluate the best checkpoint, and print JSON.",
}


def add_arguments(parser: Parser) -> None:
    """Add the run and the checkpoint."""
    add_name(parser)
    add_checkpoint(parser)
    add_json(parser)


def run(options: Namespace, runs: Path) -> int:
    """Evaluate the checkpoint and print the metrics."""
    from ..run import best, folders, owner
    from ..run.spec import read_spec
    from ..supervise import programs

    run = owner.opened(folders.find(runs, options.name))
    spec = read_spec(run)
    programs.of(spec).check_can("eval", run.name)
    wanted = best.checkpoint_named(run, by=spec.best_by, text=options.checkpoint, tell=screen.remark)
    from ..trainer.evaluate import evaluate_run

    folders.enter(spec.cwd)
    with screen.results_alone():
        step, samples, measured = evaluate_run(run, spec, wanted)
    if options.json:
        print(json.dumps({"step": step, "samples": samples, "eval": measured}))
    else:
        screen.say(f"step {step}, {samples} samples: {figures(measured)}", sys.stdout)
    return EXIT_FINISHED

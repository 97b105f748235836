"""`train export`: write the weights of a run to a file for other programs."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from .. import screen
from ..errors import EXIT_FINISHED
from .options import add_checkpoint, add_name, add_target
from .parser import Parser

SUFFIXES = (".safetensors", ".pt", ".onnx")


EXAMPLES = {
    "train export demo1 --to demo1.safetensors": "Write the weights of the newest checkpoint.",
    "train export demo1 --to best.pt --checkpoint best": "Write the weights of the best checkpoint, for torch.load.",
}


def add_arguments(parser: Parser) -> None:
    """Add the run, the file, the checkpoint and the kind of weights."""
    add_name(parser)
    add_target(parser, *SUFFIXES)
    add_checkpoint(parser)
    text = "ema: the moving average of the weights, if --ema.decay was set. Default: model."
    parser.add_argument("--weights", choices=("model", "ema"), default="model", metavar="model|ema", help=text)


def run(options: Namespace, runs: Path) -> int:
    """Write the file."""
    from ..run import best, durable, folders, owner
    from ..run.spec import read_spec
    from ..supervise import programs

    target = Path(options.to).absolute()
    durable.check_target(Path(options.to), SUFFIXES)
    run = owner.opened(folders.find(runs, options.name))
    spec = read_spec(run)
    programs.of(spec).check_can("export", run.name)
    wanted = best.checkpoint_named(run, by=spec.best_by, text=options.checkpoint, tell=screen.remark)
    from ..trainer.export import export

    folders.enter(spec.cwd)
    with screen.results_alone():
        step = export(run, spec, target, step=wanted, average=options.weights == "ema")
    which = "averaged weights" if options.weights == "ema" else "weights"
    screen.say(f"wrote {options.to}: the {which} of {run.name} after step {step}")
    return EXIT_FINISHED

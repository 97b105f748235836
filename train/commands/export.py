"""`train export`: write the weights of a run to a file for other programs."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from .. import screen
from ..errors import EXIT_FINISHED, Refused
from .options import add_checkpoint, add_name, add_target
from .parser import Parser

SUFFIXES = (".safetensors", ".pt", ".onnx")
_WHICH = {"": "weights", "model": "weights", "ema": "averaged weights", "trained": "trained weights"}
"""Maps a value of --weights to what is written. Other values are names that a session has registered."""

EXAMPLES = {
    "train export demo1 --to demo1.safetensors": "Write the weights of the newest checkpoint.",
    "train export demo1 --to best.pt --checkpoint best": "Write the weights of the best checkpoint, for torch.load.",
}


def add_arguments(parser: Parser) -> None:
    """Add the run, the file, the checkpoint and the kind of weights."""
    add_name(parser)
    add_target(parser, *SUFFIXES)
    add_checkpoint(parser)
    text = (
        "ema: the moving average of the weights, if --ema.decay was set. trained: only weights that are not frozen, "
        "under the names of model(). Default: model; with --checkpoint best, the weights that the metric was measured "
        "with. Of a script with a session: NAME that session.register gave."
    )
    parser.add_argument("--weights", default="", metavar="model|ema|trained|NAME", help=text)


def run(options: Namespace, runs: Path) -> int:
    """Write the file."""
    from .. import programs
    from ..run import best, durable, folders
    from ..run.spec import read_spec

    target = Path(options.to).absolute()
    if options.weights == "trained" and target.suffix == ".onnx":
        raise Refused("--weights trained writes only a part of the model; give --to a .safetensors or .pt file")
    durable.check_target(Path(options.to), SUFFIXES)
    run = folders.find_trusted(runs, options.name)
    spec = read_spec(run)
    program = programs.of(spec)
    program.check_can("export", run.name)
    wanted = best.checkpoint_named(run, spec, options.checkpoint, tell=screen.remark)
    which = wanted.weights(options.weights, screen.remark)
    folders.enter(spec.cwd)
    with screen.results_alone():
        step = program.export(run, spec, target, step=wanted.step, which=which)
    what = _WHICH.get(which, f"weights {which}")
    screen.say(f"wrote {options.to}: the {what} of {run.name} after step {step}{wanted.said}")
    return EXIT_FINISHED

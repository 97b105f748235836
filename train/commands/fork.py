"""`train fork`: start a new run from a checkpoint of another run, with other fields or code."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from .. import screen
from ..errors import EXIT_FINISHED, Refused
from .completion_values import task_names
from .options import (
    add_checkpoint,
    add_name,
    add_notify,
    add_on_restart,
    add_ranks,
    check_notify,
    follow,
    waiting_of,
    warn,
)
from .parser import Parser, number

EXAMPLES = {
    "train fork demo1 --name demo2 --optim.lr 0.01": (
        "Start demo2 from the newest checkpoint of demo1, with another rate."
    ),
    "train fork demo1 --name demo3 --checkpoint best --epochs 40": (
        "Start from the best checkpoint and train up to epoch 40."
    ),
    "train fork demo1 --name demo4 --task net.py": (
        "Continue with edited code, from the newest checkpoint (without one: from step 0)."
    ),
    "train fork lent1 --name lent2 -- --epochs 40": (
        "The same for a script with a session: its arguments stay, except for those after --"
    ),
}


def add_arguments(parser: Parser) -> None:
    """Add the run, the new name, the checkpoint, the fields and the ranks."""
    parser.takes_fields = True
    parser.usage = "train fork NAME [--name NEW] [--FLAG VALUE ...]\n       train fork NAME [--name NEW] -- ARGS"
    parser.continues_run = True
    add_name(parser)
    text = "Name of the new run. Default: the old name and the time."
    parser.add_argument("--name", dest="new", metavar="NEW", help=text)
    text = "The edited task: a file, or a built-in task. Default: the copy in the run folder of NAME."
    parser.add_argument("--task", metavar="FILE", help=text, offer=task_names)
    add_checkpoint(parser)
    add_ranks(parser)
    add_notify(parser)
    add_on_restart(parser)
    parser.rest = ("name",)


def run(options: Namespace, runs: Path) -> int:
    """Start the new run inside tmux and print its name; with --follow, show it until it ends."""
    name = start(options, runs)
    print(name, flush=True)
    return follow(runs, name) if options.follow else EXIT_FINISHED


def start(options: Namespace, runs: Path) -> str:
    """Start the new run inside tmux, for the command and for Python. Return its name."""
    from .. import config, programs, tasks
    from ..launcher.launches import Fork
    from ..run import best, environment, folders
    from ..run.spec import spec_of

    of = folders.find_trusted(runs, options.name)
    record, restarts = of.read(), number("max-restarts", options.max_restarts)
    spec = spec_of(record, of.read_config())
    config.check_flags(options.flags)
    check_notify(options.notify)
    if init := next((name for name in ("init", "init_skip") if name in options.flags), None):
        raise Refused(f"--{init}: a fork uses the weights of its checkpoint; for others: train launch TASK --init FILE")
    program = programs.of(spec)
    program.check_can("fork", of.name)
    program.check_options(vars(options))
    wanted = best.checkpoint_named(of, spec, options.checkpoint, tell=screen.remark)
    step = wanted.step or of.newest_checkpoint
    name = options.new or folders.fresh_name(runs, of.name)
    folders.check_free(runs, name)
    before = None if options.gpus is not None else str(spec.nproc or record["world_size"])
    task = str(tasks.locate(options.task)) if options.task is not None else None
    launch = Fork(
        of.name, step, flags=options.flags, task=task, arguments=options.arguments, on_restart=options.on_restart,
        runs=str(runs), name=name, nproc=options.nproc or before, gpus=options.gpus, max_restarts=restarts,
        keep_env=options.keep_env or [], command_line=environment.shown(options.words), notify=options.notify,
        **waiting_of(options),
    )  # fmt: skip
    warn(launch.start())
    code = f", with the code of {options.task}" if task else ""
    begins = (
        f"continues from {of.name} after step {step}{wanted.said}"
        if step
        else f"starts at step 0: {of.name} has no checkpoint"
    )
    screen.remark(f"{name} {begins}{code}")
    return name

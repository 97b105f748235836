"""`train fork`: a new run that goes on from a checkpoint of another one, with whatever is to differ."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from train import screen
from train.commands.options import add_checkpoint, add_name, add_ranks, follow, warn
from train.commands.parser import Parser, number
from train.errors import EXIT_FINISHED, Refused


def add_arguments(parser: Parser) -> None:
    """Of which run and checkpoint, what differs, and how it is spread."""
    parser.takes_fields = True
    add_name(parser)
    text = "name of the new run; default: the old one and the time"
    parser.add_argument("--name", dest="new", metavar="NEW", help=text)
    add_checkpoint(parser)
    add_ranks(parser)


def run(options: Namespace, runs: Path) -> int:
    """Start it inside tmux; print its name; follow it if wanted."""
    from train import config
    from train.launcher import tmux
    from train.launcher.request import LaunchRequest
    from train.run import best, folders, owner

    of = owner.opened(folders.find(runs, options.name))
    record, restarts = of.read(), number("max-restarts", options.max_restarts)
    config.check_flags(options.flags)
    if init := next((name for name in options.flags if name.startswith("init.")), None):
        raise Refused(f"--{init}: a fork has the weights of its checkpoint; for others: train launch TASK --init")
    if record.get("script"):
        raise Refused(f"{of.name} runs a script of its own, whose checkpoints are its own; start it anew: train launch")
    step = best.checkpoint_named(of, options.checkpoint, screen.remark) or of.newest_checkpoint
    if not step:
        raise Refused(f"{of.name} has no checkpoint here yet; see: train show {of.name}")
    name = options.new or folders.fresh_name(runs, of.name)
    folders.check_free(runs, name)
    before = None if options.gpus is not None else str(record.get("nproc") or record["world_size"])
    launch = LaunchRequest(
        kind="fork", runs=str(runs), name=name, request={"of": of.name, "step": step}, flags=options.flags,
        nproc=options.nproc or before, gpus=options.gpus, max_restarts=restarts,
    )  # fmt: skip
    warn(tmux.start(launch))
    screen.remark(f"{name} goes on from {of.name} after step {step}")
    print(name, flush=True)
    return follow(runs, name) if options.follow else EXIT_FINISHED

"""`train launch`: start a run that outlives this shell."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import screen
from ..errors import EXIT_FINISHED, Refused
from .options import (
    add_nodes,
    add_notify,
    add_ranks,
    add_script,
    add_task,
    check_notify,
    check_now,
    follow,
    nodes_of,
    request_of,
    waiting_of,
    warn,
)
from .parser import Parser, number

if TYPE_CHECKING:
    from ..launcher.launches import NewRun, NewScript
    from ..launcher.request import Request

EXAMPLES = {
    "train launch digits --name demo1 --nproc 2 --follow": (
        "Train a built-in task with two ranks and watch. Ctrl-C ends only the watching."
    ),
    "train launch spirals.py --gpus 2 --epochs 20 --optim.lr 0.01": (
        "Train your own task on two GPUs. Every config field is a flag."
    ),
    "train launch --script train.py --on-restart --resume -- --out {run}": (
        "Start your own torchrun program. Its arguments follow after --; a restart adds --resume."
    ),
}


def add_arguments(parser: Parser) -> None:
    """Add the task with its fields, or the script with its arguments; the ranks and the machines."""
    parser.takes_fields = True
    parser.usage = "train launch TASK [--FLAG VALUE ...]\n       train launch --script FILE [--FLAG VALUE ...] -- ARGS"
    parser.usage += "\n       train launch --module NAME [--FLAG VALUE ...] -- ARGS"
    add_task(parser, nargs="?")
    add_ranks(parser)
    add_notify(parser)
    add_nodes(parser)
    add_script(parser)


def run(options: Namespace, runs: Path) -> int:
    """Start the run inside tmux and print its name; with --follow, show it until it ends."""
    runs, name = start(options, runs)
    print(name, flush=True)
    return follow(runs, name) if options.follow else EXIT_FINISHED


def start(options: Namespace, runs: Path) -> tuple[Path, str]:
    """Start the run inside tmux, for the command and for Python. Return the folder of its runs, and its name."""
    from ..launcher.launches import runs_of_node
    from ..run import folders

    request = request_of(options)
    check(options, request, runs)
    check_notify(options.notify)
    cluster = nodes_of(options)
    if cluster and not options.name:
        raise Refused("--nnodes needs --name NAME too; give the same name on every machine")
    name = options.name or folders.fresh_name(runs, options.module or Path(options.script or options.task).stem)
    runs = runs_of_node(runs, name, cluster=cluster, flags=options.flags, config_file=options.config)
    folders.check_free(runs, name)
    warn(launch_of(options, request, runs, name, cluster=cluster).start())
    record = folders.find(runs, name).read()
    for line in (*record.get("init", ()), *filter(None, [record.get("precision_reason")])):
        screen.remark(line)
    return runs, name


def launch_of(
    options: Namespace, request: Request, runs: Path, name: str, *, cluster: dict[str, Any] | None = None
) -> NewRun | NewScript:
    """Return the launch that was asked for, as a run of this name."""
    from ..launcher.launches import NewRun, NewScript
    from ..run import environment

    common: dict[str, Any] = {
        "runs": str(runs), "name": name, "nproc": options.nproc, "gpus": options.gpus,
        "max_restarts": number("max-restarts", options.max_restarts), "keep_env": options.keep_env or [],
        "command_line": environment.shown(options.words), **waiting_of(options),
        "notify": getattr(options, "notify", ""),  # a proof has none
    }  # fmt: skip
    if options.task is not None:
        return NewRun(**vars(request), cluster=cluster, **common)
    return NewScript(**script_of(options), figures=options.figures or [], **common)


def script_of(options: Namespace) -> dict[str, Any]:
    """Return what was said about the script, as its check and its launch take it."""
    return {
        "script": options.script or "", "module": options.module or "", "arguments": options.arguments,
        "on_restart": options.on_restart, "flags": options.flags,
    }  # fmt: skip


def check(options: Namespace, request: Request, runs: Path) -> None:
    """Refuse options that exclude each other, and what can be found wrong without torch."""
    if sum(given is not None for given in (options.script, options.module, options.task)) != 1:
        way = "a TASK, or --script FILE or --module NAME with arguments after --"
        raise Refused(f"give one of: {way}; see: {' '.join(options.words[:2])} --help")
    from .. import programs
    from ..scripts import check, reader

    (programs.SCRIPT if options.task is None else programs.TASK).check_options(vars(options))
    if options.task is not None:
        check_now(request, runs)
        return

    reader.check(options.figures or [])
    check.check_now(**script_of(options))

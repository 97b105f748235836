"""`train resume`: continue runs that have not finished."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from .. import screen
from ..errors import EXIT_FINISHED, EXIT_REFUSED, Refused
from .options import (
    add_figures,
    add_name,
    add_nodes,
    add_notify,
    add_on_restart,
    add_ranks,
    check_notify,
    follow,
    nodes_of,
    waiting_of,
    warn,
)
from .parser import Parser, number

EXAMPLES = {
    "train resume demo1 --follow": "Continue from the last checkpoint with the same ranks, and watch.",
    "train resume demo1 --nproc 4 --epochs 40": "Continue with four ranks, and train up to epoch 40.",
    "train resume --all": "Continue every run that was interrupted.",
}


def add_arguments(parser: Parser) -> None:
    """Add the run and the fields that may change, or --all."""
    parser.takes_fields = True
    parser.usage = "train resume NAME [--FLAG VALUE ...]\n       train resume --all"
    parser.continues_run = True
    add = parser.add_argument
    add_ranks(parser)
    add_notify(parser)
    add_nodes(parser)
    add_on_restart(parser)
    add_figures(parser)
    add_name(parser, nargs="?")
    text = "Every run started here that was interrupted, or that a signal or the keeper stopped."
    add("--all", action="store_true", help=text)


def run(options: Namespace, runs: Path) -> int:
    """Start the runs inside tmux and print their names; with --follow, show one run until it ends."""
    from ..launcher.resumable import is_resumable
    from ..monitor.status import here
    from ..run import folders

    number("max-restarts", options.max_restarts)
    check_notify(options.notify)
    if (options.name is None) == (not options.all):
        raise Refused("give the NAME of a run, or --all; train ls lists the runs")
    of_one = (options.flags, options.nnodes, options.figures, options.on_restart is not None, options.after)
    if options.all and (options.follow or any(of_one)):
        raise Refused("--all takes neither --follow nor fields; resume each run by its name: train resume NAME")
    if not options.all:
        begun = start(options, runs)
        if begun is not None:
            screen.say(options.name, sys.stdout)
        return follow(begun, options.name) if begun is not None and options.follow else EXIT_FINISHED
    code, found = EXIT_FINISHED, dict[str, bool | None]()
    for one in folders.every(runs):
        try:
            found[one.name] = is_resumable(here(one).record)
        except Refused as error:
            screen.remark(f"skipped {one.name}: {error}")
            code = EXIT_REFUSED
    names = [name for name in found if found[name]]
    for name in (name for name in found if found[name] is None):
        screen.remark(f"skipped {name}, which was not started here; to adopt it: train resume {name}")
    if not names and code == EXIT_FINISHED:
        screen.say(f"no run in {runs} was interrupted; to continue a stopped or failed run: train resume NAME")
    for name in names:
        options.name = name
        try:
            if start(options, runs) is not None:
                screen.say(name, sys.stdout)
        except Refused as error:
            screen.remark(f"{name}: {error}")
            code = EXIT_REFUSED
    return code


def start(options: Namespace, runs: Path) -> Path | None:
    """Start one run, for the command and for Python. Return the folder of its runs; None: it has finished already.

    Raises:
        Refused: the run is running, or cannot be resumed with these options.
    """
    from ..cluster import jobs
    from ..launcher.launches import Resume
    from ..launcher.resumable import check_flags, nothing_left
    from ..monitor.status import here
    from ..run import folders

    name = options.name
    runs = folders.of_this_machine(runs, name, number("node-rank", options.node_rank))
    run = folders.find_trusted(runs, name)
    one = here(run)
    check_flags(run, one.spec.config, options.flags)
    if jobs.is_submitted(one.record):
        _check_submitted(options, name)
        said = jobs.resume(run.by_path(), options.flags)
        if not said:
            screen.say(f"{name} has finished already; for more: train resume {name} --epochs N")
            return None
        screen.remark(said)
        return runs
    if said := nothing_left(one.record, options.flags):
        screen.say(said)
        return None
    before = one.spec.cluster
    cluster = nodes_of(options, before)
    if before and before["node"] and cluster is not None and not cluster.get("node"):
        raise Refused(f"{name} has its checkpoints on node 0, but this is node {before['node']}; resume it on node 0")
    launch = Resume(
        runs=str(runs), name=name, flags=options.flags, nproc=options.nproc, gpus=options.gpus, cluster=cluster,
        max_restarts=number("max-restarts", options.max_restarts), keep_env=options.keep_env or [],
        on_restart=options.on_restart, figures=options.figures, notify=options.notify,
        **waiting_of(options, is_one_of_many=options.all),
    )  # fmt: skip
    warn(launch.start())
    return runs


def _check_submitted(options: Namespace, name: str) -> None:
    """Refuse options that would change the shape of a submitted run."""
    if options.queue or options.after or options.no_lease or options.gives_way:
        raise Refused(
            f"{name} waits in the queue of its cluster; leave out --queue, --after, --gives-way and --no-lease"
        )
    for option in ("nproc", "gpus", "nnodes", "node_rank", "rendezvous", "wait_minutes", "max_restarts", "notify"):
        if getattr(options, option) is not None:
            flag = option.replace("_", "-")
            raise Refused(
                f"--{flag}: a run of train submit keeps its nodes and ranks; leave --{flag} out, or fork {name}"
            )

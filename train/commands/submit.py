"""`train submit`: hand a run to a cluster: Slurm or Kubernetes."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from .. import programs, screen
from ..cluster.engine import ENGINES, Submission, engine, seconds_of
from ..errors import EXIT_FINISHED, Refused
from ..launcher.ranks_and_gpus import MOST_RANKS
from ..supervise.timeouts import WAIT_MINUTES
from .completion_values import words
from .options import MOST_NODES, add_task, check_now, follow, request_of, wait_minutes
from .parser import Parser, number

EXAMPLES = {
    "train submit digits --on slurm --nodes 2 --gpus-per-node 4 --time 8:00:00": "Hand a run on 8 GPUs to Slurm.",
    "train submit digits --on kubernetes --gpus-per-node 1 --dry-run": (
        "Print what Kubernetes would get. Create nothing."
    ),
    "train submit digits --on slurm --nproc 4 --follow": (
        "Train on CPUs with four ranks, and show the log until the run ends."
    ),
}


def add_arguments(parser: Parser) -> None:
    """Add the task with its fields, the nodes and the time limit; then the options of each engine."""
    parser.takes_fields = True
    parser.usage = "train submit TASK --on ENGINE [--FLAG VALUE ...]"
    add = parser.add_argument
    add_task(parser)
    add("--on", metavar="ENGINE", help=f"The cluster's engine: {' or '.join(ENGINES)}.", offer=words(*ENGINES))
    add("--nodes", metavar="N", help="Number of machines. Default: 1.")
    add("--gpus-per-node", metavar="G", help="GPUs on each machine. Default: none; the ranks of --nproc use CPUs.")
    add("--nproc", metavar="N", help="Ranks on each machine. Default: one per GPU.")
    add("--time", metavar="LIMIT", help="Time limit: minutes, 8:00:00 or 2-12:00:00. Default: the engine's.")
    add("--dry-run", action="store_true", help="Print what the engine would get. Create nothing.")
    text = "Show the state and the log until the run ends, then exit with its code: 0, 3 or 75."
    add("--follow", action="store_true", help=text)
    add("--container", metavar="IMAGE", help="Image in which each node runs.")
    add("--mem", metavar="SIZE", help="Memory of each node, such as 64G.")
    add("--cpus-per-task", metavar="N", help="CPUs of each node, for all its ranks together.")
    add("--warn", metavar="SECONDS", help="Seconds before the time limit at which all ranks save. Default: 120.")
    text = "Minutes a node waits for the others. Default: 30."
    add("--wait-minutes", metavar="M", default=str(WAIT_MINUTES), help=text)
    text = "Give up after K restarts in a row without a new checkpoint. Default: 3."
    add("--max-restarts", metavar="K", default=str(programs.TASK.default_restarts), help=text)
    for name in ENGINES:
        engine(name).options(parser)


def run(options: Namespace, runs: Path) -> int:
    """Check the request, hand it over and print the run's name; with --follow, show it until it ends."""
    if options.follow and options.dry_run:
        raise Refused("--dry-run starts no run that --follow could show; leave one of them out")
    asked = _submission(options, runs)
    from ..cluster import jobs

    said = jobs.submit(asked)
    if asked.is_dry:
        print(said, end="", flush=True)
        return EXIT_FINISHED
    screen.remark(said)
    print(asked.name, flush=True)
    return follow(runs, asked.name) if options.follow else EXIT_FINISHED


def _submission(options: Namespace, runs: Path) -> Submission:
    from ..run import folders

    if options.on not in ENGINES:
        given = "--on is missing" if options.on is None else f"--on {options.on}"
        raise Refused(f"{given}: give the cluster's engine, --on {' or --on '.join(ENGINES)}")
    request = request_of(options)
    check_now(request, runs if options.on == "slurm" else None, is_here=False)
    name = options.name or folders.fresh_name(runs, Path(options.task).stem)
    folders.check_free(runs, name)
    gpus = number("gpus-per-node", options.gpus_per_node, most=MOST_RANKS) or 0
    nproc = number("nproc", options.nproc, 1, MOST_RANKS) or gpus
    if not nproc:
        raise Refused("give --gpus-per-node G, or --nproc N for ranks on CPUs")
    if gpus and nproc > gpus:
        raise Refused(f"--nproc {nproc} is more than the {gpus} GPUs of a node; give at most {gpus}")
    return Submission(
        task=request.task,
        flags=request.flags,
        config_file=request.config_file,
        engine=options.on,
        runs=runs,
        name=name,
        gpus_per_node=gpus,
        nproc=nproc,
        nodes=number("nodes", options.nodes, 1, MOST_NODES) or 1,
        seconds=seconds_of(options.time) if options.time is not None else None,
        warn=number("warn", options.warn, 1) or 120,
        cpus=number("cpus-per-task", options.cpus_per_task, 1),
        memory=options.mem,
        image=options.container,
        wait_minutes=wait_minutes(options.wait_minutes),
        max_restarts=number("max-restarts", options.max_restarts) or 0,
        own=_own(options),
        is_dry=options.dry_run,
    )


def _own(options: Namespace) -> dict[str, Any]:
    """Return the options of the chosen engine.

    Raises:
        Refused: an option of another engine was given.
    """
    found: dict[str, Any] = {}
    for name in ENGINES:
        parser = Parser(prog="train submit")
        engine(name).options(parser)
        for action in parser.flags.values():
            value = getattr(options, action.dest)
            if name == options.on:
                found[action.dest] = value
            elif value not in (None, False):
                raise Refused(f"{action.option_strings[-1]} is for --on {name}; leave it out")
    return found

"""`train submit`: hand a run to an engine of a cluster."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from train import screen
from train.cluster.engine import ENGINES, Submission, engine, seconds_of
from train.commands.completion_values import words
from train.commands.options import MOST_NODES, add_task, check_now, follow, request_of, wait_minutes
from train.commands.parser import Parser, number
from train.errors import EXIT_FINISHED, Refused
from train.launcher.ranks_and_gpus import MOST_RANKS
from train.supervise.attempts import MAX_RESTARTS
from train.supervise.timeouts import WAIT_MINUTES


def add_arguments(parser: Parser) -> None:
    """A task with its fields, on what, and for how long; then what each engine has beyond that."""
    parser.takes_fields = True
    add = parser.add_argument
    add_task(parser)
    add("--on", metavar="ENGINE", help=" or ".join(ENGINES), offer=words(*ENGINES))
    add("--nodes", metavar="N", help="machines (1)")
    add("--gpus-per-node", metavar="G", help="GPUs on each; none: it computes on CPUs, and --nproc says how many ranks")
    add("--nproc", metavar="N", help="ranks on each node; default: one per GPU")
    add("--time", metavar="LIMIT", help="time limit: minutes, or 8:00:00, or 2-12:00:00; default: the engine's")
    add("--warn", metavar="SECONDS", help="how long before the time limit all ranks save (120)")
    add("--cpus-per-task", metavar="N", help="CPUs for each node's ranks together")
    add("--mem", metavar="SIZE", help="memory of each node, as 64G")
    add("--container", metavar="IMAGE", help="the image that each node runs in")
    add("--wait-minutes", metavar="M", default=str(WAIT_MINUTES), help="how long a node waits for the others (30)")
    text = "deaths in a row without a new checkpoint before giving up (3)"
    add("--max-restarts", metavar="K", default=str(MAX_RESTARTS), help=text)
    add("--dry-run", action="store_true", help="print what the engine would be given; create nothing")
    add("--follow", action="store_true", help="show how it stands and its log, and exit as the run does: 0, 3 or 75")
    for name in ENGINES:
        engine(name).options(parser)


def run(options: Namespace, runs: Path) -> int:
    """Check the request, hand it over, print the run's name; follow it if wanted."""
    if options.follow and options.dry_run:
        raise Refused("--follow and --dry-run: of what is only shown there is nothing to follow; leave one of them out")
    asked = _submission(options, runs)
    from train.cluster import jobs

    said = jobs.submit(asked)
    if asked.is_dry:
        print(said, end="", flush=True)
        return EXIT_FINISHED
    screen.remark(said)
    print(asked.name, flush=True)
    return follow(runs, asked.name) if options.follow else EXIT_FINISHED


def _submission(options: Namespace, runs: Path) -> Submission:
    from train.run import folders

    if options.on not in ENGINES:
        given = "--on is missing" if options.on is None else f"--on {options.on}"
        raise Refused(f"{given}: give the engine that takes the run: {' or '.join(ENGINES)}")
    request = request_of(options)
    check_now(request, runs if options.on == "slurm" else None, is_here=False)
    name = options.name or folders.fresh_name(runs, Path(options.task).stem)
    folders.check_free(runs, name)
    gpus = number("gpus-per-node", options.gpus_per_node, most=MOST_RANKS) or 0
    nproc = number("nproc", options.nproc, 1, MOST_RANKS) or gpus
    if not nproc:
        raise Refused("give --gpus-per-node G, or --nproc N for ranks on CPUs")
    if gpus and nproc > gpus:
        raise Refused(f"--nproc {nproc}: more ranks than the {gpus} GPUs of a node")
    request |= {"engine": options.on, "runs": runs, "name": name, "gpus_per_node": gpus, "nproc": nproc}
    return Submission(
        **request,
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
    """What the chosen engine's own options were given.

    Raises:
        Refused: one of another engine was given.
    """
    found: dict[str, Any] = {}
    for name in ENGINES:
        parser = Parser(prog="train submit")
        engine(name).options(parser)
        for action in parser.flags.values():
            if action.dest == "help":
                continue
            value = getattr(options, action.dest)
            if name == options.on:
                found[action.dest] = value
            elif value not in (None, False):
                raise Refused(f"{action.option_strings[-1]} is for --on {name}; leave it out")
    return found

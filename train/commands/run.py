"""`train run`: train in this terminal."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from ..launcher.ranks_and_gpus import MOST_RANKS
from ..parallel.rank_env import is_under_torchrun
from .options import add_lease, add_task, check_now, request_of
from .parser import Parser, number

EXAMPLES = {
    "train run digits --epochs 2": "Train here. Ctrl-C saves and stops; a second Ctrl-C ends at once.",
    "train run spirals.py --spawn 2 --config config.toml --optim.lr 0.1": (
        "Train your own task with two ranks. Flags win over the file."
    ),
}


def add_arguments(parser: Parser) -> None:
    """Add the task, its fields and the number of ranks."""
    parser.takes_fields = True
    parser.usage = "train run TASK [--FLAG VALUE ...]"
    add_task(parser)
    add_lease(parser)
    parser.add_argument("--spawn", metavar="N", help="Start N ranks on this machine. Default: 1.")


def run(options: Namespace, runs: Path) -> int:
    """Train until the end, or until a request to stop."""
    request, spawn = request_of(options), number("spawn", options.spawn, 1, MOST_RANKS)
    if options.name is not None and not is_under_torchrun():
        from ..run import folders

        folders.check_free(runs, options.name)
    check_now(request, runs)
    from ..launcher import foreground
    from ..launcher.launches import NewRun
    from ..run import environment

    new = NewRun(
        **vars(request),
        runs=str(runs), name=options.name or "", nproc=str(spawn or 1), command_line=environment.shown(options.words),
        lease=not options.no_lease,
    )  # fmt: skip
    return foreground.run(new, is_spawned=spawn is not None)

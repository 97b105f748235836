"""`train prove`: show that no kill changes the bits of a run, or where one does."""

from __future__ import annotations

import json
import re
import signal
import sys
from argparse import SUPPRESS, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from .. import screen
from ..errors import EXIT_FAILED, EXIT_FINISHED, Refused
from .launch import check, launch_of, script_of
from .options import add_json, add_ranks, add_script, add_task, request_of
from .parser import Parser, number

if TYPE_CHECKING:
    from ..launcher.request import Request
    from ..proof.broken import Launch
    from ..proof.prove import Proof

UPDATES, KILLS, MOMENTS = 60, 4, 1
"""Defaults of the options."""
_MIRROR = "checkpoint.mirror"
_NOT_HERE = {
    "follow": "a proof prints its own progress", "name": "a proof names its runs itself",
    "after": "a proof starts now, or in the queue (--queue)",
}  # fmt: skip
"""Maps options of a launch that a proof does not take to the reason."""

EXAMPLES = {
    "train prove --script train.py --nproc 2 -- --lr 0.1": "Prove your own script, which opens a session.",
    "train prove digits --nproc 2 --kills 8": "Prove a task, broken off eight times.",
    "train prove train.py --also 1,3": "The same for other numbers of ranks, each by itself.",
}


def add_arguments(parser: Parser) -> None:
    """Add the program with all that a launch takes, and how it is broken off."""
    parser.takes_fields = True
    parser.usage = "train prove TASK [--FLAG VALUE ...]\n       train prove --script FILE [--FLAG VALUE ...] -- ARGS"
    add = parser.add_argument
    add_task(parser, nargs="?")
    own = "how the run is broken off"
    add("--updates", metavar="N", section=own, help=f"Updates after which each run stops. Default: {UPDATES}.")
    text = "Number of breaks: a stop, a rank killed, everything killed, a rank killed in a save; then at random. "
    add("--kills", metavar="K", section=own, help=f"{text}Default: {KILLS}.")
    add("--moments", metavar="SEED", section=own, help=f"Seed of the updates at which it breaks. Default: {MOMENTS}.")
    add("--also", metavar="N,N", section=own, help="More numbers of ranks to prove, each by itself.")
    add("--keep", action="store_true", section=own, help="Keep the runs of an exact proof.")
    add_json(parser)
    add_ranks(parser)
    add_script(parser)
    parser.rest = (*parser.rest, "task")
    for name in _NOT_HERE:
        parser.flags[name].help = SUPPRESS


def run(options: Namespace, runs: Path) -> int:
    """Prove each number of ranks, and print the verdicts. Return 0 if all are exact, else 3."""
    for kind in (signal.SIGTERM, signal.SIGHUP):  # like Ctrl-C, they end the runs
        signal.signal(kind, lambda at, _: sys.exit(128 + at))
    found = proofs(options, runs)
    if options.json:
        shown = [one.to_json() for one in found]
        print(json.dumps(shown if options.also else shown[0], indent=1, default=str))
    else:
        for one in found:
            print(one.text(), flush=True)
    if len(found) > 1 and _is_ordered(options) and len({one.digests.get("model") for one in found}) > 1:
        screen.remark("the numbers of ranks end with different weights, though parallel.reduce is ordered")
        return EXIT_FAILED
    return max((one.code for one in found), default=EXIT_FINISHED)


def proofs(options: Namespace, runs: Path) -> list[Proof]:
    """Prove each number of ranks, for the command and for Python.

    Raises:
        Refused: the request is wrong; nothing was created.
    """
    from ..proof.prove import Wanted, prove

    for name, why in _NOT_HERE.items():
        if getattr(options, name, None):
            raise Refused(f"--{name}: {why}; leave it out")
    options.nnodes = None
    if options.task is not None and options.script is None and _is_script(options.task):
        options.script, options.task = options.task, None
    request = request_of(options)
    check(options, request, runs)
    if options.task is None:
        _check_session(options)
    else:
        request.flags = {"log.samples": "true", **request.flags, "log.wandb": ""}
        _check_mirror(request)
    what = options.module or options.script or options.task
    kills = number("kills", options.kills, 1) or KILLS
    updates = number("updates", options.updates, 3) or UPDATES
    if kills > updates - 2:
        raise Refused(f"--kills {kills}: at most {updates - 2} fit into {updates} updates; give more --updates")
    seed = number("moments", options.moments, 0)
    also = [number("also", text, 1) for text in options.also.split(",")] if options.also else []

    def launch(folder: Path, name: str, ranks: int | None) -> Launch:
        made = launch_of(options, request, folder, name)
        if ranks is not None:
            made.nproc, made.gpus = str(ranks), None
        return made

    wanted = Wanted(
        launch=launch, updates=updates, kills=kills, seed=MOMENTS if seed is None else seed,
        keep=options.keep, say=screen.remark,
    )  # fmt: skip
    screen.remark(
        f"{what} runs twice up to update {updates}, or five times if something differs; what it writes outside {{run}} "
        "is written each time"
    )
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(what).stem).strip("-_.")[:40] or "run"
    return [prove(wanted, runs, stem, ranks=ranks) for ranks in (None, *also)]


def _is_ordered(options: Namespace) -> bool:
    return bool(options.flags.get("parallel.reduce") == "ordered")


def _is_script(task: str) -> bool:
    """Whether a file is a script with a session and no task."""
    from ..scripts.check import opens_session

    path = Path(task)
    if path.suffix != ".py" or not path.is_file() or not opens_session(path):
        return False
    return re.search(rb"^(def datasets\b|datasets\s*=|from .* import .*\bdatasets\b)", path.read_bytes(), re.M) is None


def _check_session(options: Namespace) -> None:
    """Refuse a script without a session: nothing is known of its state."""
    from ..scripts.check import check as check_script

    record, _ = check_script(**script_of(options))
    if not record["expects_session"]:
        name = Path(record["script"]).name
        raise Refused(
            f"{name} opens no session, so its state is not known; add ts.session() and register what it trains "
            "with: docs/sessions.md"
        )


def _check_mirror(request: Request) -> None:
    """Refuse a mirror that was asked for, and switch off that of a file."""
    if request.flags.get(_MIRROR):
        raise Refused(f"--{_MIRROR}: a proof is not mirrored; leave it out")
    if request.config_file is not None:
        request.flags[_MIRROR] = ""

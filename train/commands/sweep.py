"""`train sweep`: launch a run for each combination of values, and compare them."""

from __future__ import annotations

import dataclasses
import itertools
import os
import secrets
import time
from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .. import config, screen
from ..errors import EXIT_FINISHED, Refused, is_whole, nearest, whole
from ..launcher.launches import NewSweep, Resume
from ..launcher.sweep import change, check_free
from ..run import environment, folders, states
from ..run.run_folder import Run
from ..sweeps import kept
from ..sweeps.kept import Sweep
from ..sweeps.space import Parameters, Space, numbered
from .launch import check, launch_of
from .options import add_notify, add_ranks, add_script, add_task, check_notify, follow, request_of, warn
from .parser import Parser, number

EXAMPLES = {
    "train sweep digits --name lr --grid optim.lr=1e-3,1e-2 --repeat seed=0..2": (
        "Try two rates with three seeds each: six runs. train ls lr compares them."
    ),
    "train sweep net.py --name s --search optim.lr=log:1e-5..1e-2 --trials 20": "Draw the rate of 20 runs by chance.",
    "train sweep --script train.py --name t --grid lr=0.1,0.01 -- --lr {lr}": "Sweep over an argument of a script.",
    "train sweep lr --add optim.lr=3e-3": "Give a sweep more values, also when it has finished.",
}
_OF_NEW = (
    "grid", "search", "repeat", "search_seed", "metric", "name", "config", "nproc", "gpus", "max_restarts", "keep_env",
    "script", "module", "on_restart", "figures", "queue", "after", "gives_way", "no_lease", "notify", "rungs",
)  # fmt: skip
"""Options of a new sweep, which one that exists cannot change."""
_PATIENCE = 30.0
"""Seconds a running sweep gets to read its new trials."""


def add_arguments(parser: Parser) -> None:
    """Add the task or script as for a launch, and the space."""
    parser.takes_fields = True
    parser.usage = "train sweep TASK --grid NAME=VALUES [--FLAG VALUE ...]\n       train sweep NAME --add NAME=VALUES"
    parser.usage += "\n       train sweep --script FILE --grid NAME=VALUES [--FLAG VALUE ...] -- ARGS"
    add = parser.add_argument
    text = "Values of a field, each tried with each value of the other fields: 1e-3,1e-2 or 0..4. Several times."
    add("--grid", metavar="NAME=VALUES", action="append", default=[], help=text)
    text = "What values are drawn from: log:1e-5..1e-2, 0..0.5, 1..8 (whole numbers) or 32,64. Several times."
    add("--search", metavar="NAME=VALUES", action="append", default=[], help=text)
    text = "Values over which the table takes mean and deviation, such as seed=0..2. Several times."
    add("--repeat", metavar="NAME=VALUES", action="append", default=[], help=text)
    add("--trials", metavar="N", help="Number of draws of --search. Of a search that exists: its new number.")
    add("--search-seed", metavar="N", help="Seed of --search. Default: 0. A draw depends on it and its number alone.")
    text = "Maximum number of trials at the same time. Default: GPUs / ranks of a trial; without a GPU 1."
    add("--at-once", metavar="N", help=text)
    text = (
        "By what trials are compared: accuracy, min:wer, or last:accuracy for the last evaluation and not the best. "
        "Default: checkpoint.best of the task, else the loss."
    )
    add("--metric", metavar="NAME", help=text)
    text = (
        "Steps after which the trials are compared, such as 500,2000: each time the best third continues. The learning "
        "rate must not depend on the length of the run."
    )
    add("--rungs", metavar="STEPS", help=text)
    add("--add", metavar="NAME=VALUES", action="append", default=[], help="More values for a sweep that exists.")
    add("--retry-failed", action="store_true", help="Start the failed trials of a sweep that exists again.")
    add("--dry-run", action="store_true", help="Print the trials and start nothing.")
    add_task(parser, nargs="?")
    add_ranks(parser)
    add_notify(parser)
    add_script(parser)


def run(options: Namespace, runs: Path) -> int:
    """Start or extend the sweep and print its name; with --dry-run, print its trials."""
    if options.dry_run:
        if _is_change(options):
            raise Refused("--dry-run is for a new sweep; leave it out, or look: train ls NAME")
        sweep, name = _asked(options, runs)
        _existing(runs, name, sweep)
        for trial, parameters in sweep.trials.items():
            print(f"{trial}  {' '.join(f'{field}={value}' for field, value in parameters.items())}")
        at_once = f", {options.at_once} at once" if options.at_once else ""
        rungs = f", compared after step {options.rungs}" if options.rungs else ""
        print(f"{len(sweep.trials)} trials{at_once}{rungs}; nothing was started")
        return EXIT_FINISHED
    runs, name = start(options, runs)
    print(name, flush=True)
    return follow(runs, name) if options.follow else EXIT_FINISHED


def start(options: Namespace, runs: Path) -> tuple[Path, str]:
    """Start, continue or extend a sweep, for the command and for Python. Return the folder of runs, and its name.

    Raises:
        Refused: the request is wrong; nothing was created or changed.
    """
    if options.dry_run:
        raise Refused("dry_run is for the command line: train sweep … --dry-run")
    at_once = number("at-once", options.at_once, 1) or 0
    if _is_change(options):
        run, edit = _change(options, runs)
        _continue(run, edit, at_once)
        return runs, run.name
    sweep, name = _asked(options, runs)
    if (known := _existing(runs, name, sweep)) is not None:
        _continue(known, lambda found: found, at_once, options.notify)
        return runs, name
    launch = NewSweep(
        runs=str(runs), name=name, sweep=sweep.to_json(), keep_env=options.keep_env or [],
        command_line=str(sweep.launch["command_line"]), lease=False, notify=options.notify,
    )  # fmt: skip
    warn(launch.start())
    _tell(folders.find(runs, name))
    return runs, name


def _existing(runs: Path, name: str, sweep: Sweep) -> Run | None:
    """Return the run of the sweep, which its command starts again; None: it is new, and its names are free.

    Raises:
        Refused: another run has one of its names.
    """
    if not (runs / name / "run.json").exists():
        check_free(runs, [name, *sweep.trials])
        return None
    run = folders.find(runs, name)
    if (known := kept.find(run)) is None:
        raise Refused(f"a run named {name} exists, and it is no sweep; choose another name")
    if not known.wants(sweep):
        more = "" if known.rungs else f", or give it more values: train sweep {name} --add NAME=VALUES"
        raise Refused(f"{name} is a sweep with another space or other fields; choose another --name{more}")
    return run


def _tell(run: Run) -> None:
    sweep = kept.read(run)
    drawn = f", drawn by chance from seed {sweep.space.seed}" if sweep.space.search else ""
    screen.remark(f"{run.name}: {len(sweep.trials)} trials, {sweep.at_once} at once{drawn}; see: train ls {run.name}")


def _is_change(options: Namespace) -> bool:
    return bool(options.add or options.retry_failed or (options.trials is not None and not options.search))


def _asked(options: Namespace, runs: Path) -> tuple[Sweep, str]:
    """Return the sweep that was asked for, and its name, after the checks that need no torch."""
    inside = Path(os.environ.get("TRAIN_RUN_DIR") or "/")
    if folders.record_of(inside.parent, inside.name).get(kept.OF):
        raise Refused(f"{inside.name} is a trial of a sweep and cannot start a sweep; give the outer one more values")
    request = request_of(options)
    check(options, request, runs)
    if options.task is not None and (runs / options.task / kept.FILE).exists():
        raise Refused(f"{options.task} is a sweep; more values: train sweep {options.task} --add NAME=VALUES")
    space = Space.read(
        grid=options.grid, search=options.search, repeat=options.repeat, draws=number("trials", options.trials, 1),
        seed=number("search-seed", options.search_seed),
    )  # fmt: skip
    cells = space.cells()
    _check_names(options, [*space.grid, *space.search, *space.repeat])
    check_notify(options.notify)
    if options.after is not None:
        raise Refused("--after: a sweep starts now; wait for the others first: train wait NAME && train sweep …")
    # trials go through the queue, and the sweep tells of its end for all of them
    launch = launch_of(options, request, runs, "").to_json() | {"runs": "", "notify": ""}
    launch["queue"] = launch["lease"]
    if options.rungs is not None:
        launch["rungs"] = _rungs(options)
    _check_values(launch, cells)
    if options.metric is not None and not kept.Metric.read(options.metric).name:
        raise Refused(f"--metric {options.metric}: give the name of a metric, as in max:accuracy")
    name = options.name or folders.fresh_name(runs, options.module or Path(options.script or options.task).stem)
    sweep = Sweep(
        id=secrets.token_hex(8), launch=launch, space=space, metric=options.metric or "",
        at_once=number("at-once", options.at_once, 1) or 0,
        trials=dict(zip(numbered(name, len(cells)), cells, strict=True)),
    )  # fmt: skip
    return sweep, name


def _rungs(options: Namespace) -> list[int]:
    """Return the steps after which trials are compared. Raises Refused."""
    if options.task is None:
        raise Refused("--rungs is for a task: the trials of a script end when the script ends; leave it out")
    words = [word.strip() for word in options.rungs.split(",")]
    found = [whole(word) if is_whole(word) else 0 for word in words]
    if found[0] < 1 or any(later <= earlier for earlier, later in itertools.pairwise(found)):
        raise Refused(f"--rungs {options.rungs}: give steps in rising order, as in 500,2000")
    return found


def _check_names(options: Namespace, names: list[str]) -> None:
    """Check that the task has these fields, or the arguments of the script these names. Raises Refused."""
    words, known = " ".join([*options.arguments, options.on_restart or ""]), config.fields()
    for name in names:
        if options.task is None:
            if name == "run" or f"{{{name}}}" not in words:
                way = f"write {{{name}}} after --, as in --lr {{lr}}"
                raise Refused(f"{name}: no argument of the script takes it; {way}")
        elif name == "device":
            raise Refused("device: all trials of a sweep train on the same device; start a sweep for each")
        elif name in options.flags:
            raise Refused(f"--{name} {options.flags[name]}: the sweep sets {name}; leave one of them out")
        elif name not in known and not name.startswith(("task.", "optim.args.")):
            raise Refused(f"unknown field {name}{nearest(name, known, otherwise='; see: train run --help')}")


def _check_values(launch: Any, cells: Iterable[Parameters]) -> None:
    """Check the fields of trials of a task, as far as the task is not needed for that. Raises Refused."""
    if launch["launch"] == "NewRun":
        for cell in cells:
            config.check_flags({**launch["flags"], **cell})


def _change(options: Namespace, runs: Path) -> tuple[Run, Callable[[Sweep], Sweep]]:
    """Return the sweep that gets more trials, or whose failed trials start again, and its change."""
    others = {name: getattr(options, name) for name in _OF_NEW} | options.flags
    what = "--add" if options.add else "--retry-failed" if options.retry_failed else "--trials"
    if options.task is None or any(others.values()):
        given = next((f"; leave out --{name.replace('_', '-')}" for name, value in others.items() if value), "")
        raise Refused(f"{what} is for a sweep that exists and keeps its fields: train sweep NAME {what}{given}")
    run, draws = folders.find_trusted(runs, options.task).by_path(), number("trials", options.trials, 1)
    if not (run.read().get("sweep") or (run.folder / kept.FILE).exists()):
        raise Refused(f"{run.name} is no sweep, and {what} is for one; see: train ls")
    before = kept.read(run)
    if before.rungs and (options.add or draws is not None):
        raise Refused(f"{run.name} compares its trials at rungs (--rungs), so it gets no others; start another sweep")
    failed = {}
    if options.retry_failed:
        found, chosen = kept.look_at_all(run, before), run.read().get(kept.CHOSEN) or {}
        again = kept.open_failures(before, found, chosen)
        failed = {one.name: len(one.record["attempts"]) if one.record else 0 for one in again}
        if not again and any(one.has_failed for one in found):
            raise Refused(
                f"--retry-failed: {run.name} has compared its trials without those that failed; start another"
            )

    def edit(sweep: Sweep) -> Sweep:
        if options.add or draws is not None:
            sweep = sweep.extended(sweep.space.extended(options.add, draws))
            commands = f"{sweep.launch['command_line']} && {environment.shown(options.words)}"
            sweep = dataclasses.replace(sweep, launch={**sweep.launch, "command_line": commands})
            new = {name: cell for name, cell in sweep.trials.items() if name not in before.trials}
            check_free(runs, new)
            _check_values(sweep.launch, new.values())
        return dataclasses.replace(sweep, retry={**sweep.retry, **failed})

    return run, edit


def _continue(run: Run, edit: Callable[[Sweep], Sweep], at_once: int, notify: str | None = None) -> None:
    """Change a sweep, and make sure that its loop runs if it has trials to launch."""

    def forget(record: Any) -> None:
        retried, before = kept.read(run).retry, record.get(kept.NOT_STARTED) or {}
        record[kept.NOT_STARTED] = {name: why for name, why in before.items() if name not in retried}

    sweep = change(run, lambda found: dataclasses.replace(edit(found), at_once=at_once or found.at_once), forget)
    until = time.monotonic() + _PATIENCE
    while run.alive():
        has_read = run.read().get(kept.READ) == kept.stamp(run)
        if has_read or time.monotonic() > until:
            how = "runs; see: train ls" if has_read else "has not read the change yet; see: train logs"
            screen.remark(f"{run.name} {how} {run.name}")
            return
        time.sleep(0.1)
    chosen = run.read().get(kept.CHOSEN) or {}
    is_done = all(kept.has_ended(one, chosen) and not one.has_failed for one in kept.look_at_all(run, sweep))
    if is_done and run.state() == states.FINISHED:
        screen.remark(f"{run.name} has finished already; see: train ls {run.name}")
        return
    warn(Resume(runs=str(run.path.parent), name=run.name, notify=notify).start())
    _tell(run)

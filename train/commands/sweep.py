"""`train sweep`: launch a run for each combination of values, and compare them."""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import screen
from ..errors import EXIT_FINISHED, Refused
from .launch import check, launch_of
from .options import add_ranks, add_script, add_task, follow, request_of, warn
from .parser import Parser, number

if TYPE_CHECKING:
    from ..run.run_folder import Run
    from ..sweeps.kept import Sweep
    from ..sweeps.space import Parameters

EXAMPLES = {
    "train sweep digits --name lr --grid optim.lr=1e-3,1e-2 --repeat seed=0..2": (
        "Try two rates with three seeds each: six runs. train ls lr compares them."
    ),
    "train sweep net.py --name s --search optim.lr=log:1e-5..1e-2 --trials 20": "Draw the rate of 20 runs by chance.",
    "train sweep --script train.py --name t --grid lr=0.1,0.01 -- --lr {lr}": "Sweep over an argument of a script.",
    "train sweep lr --add optim.lr=3e-3": "Give a sweep more values, also when it has finished.",
}
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
    add("--add", metavar="NAME=VALUES", action="append", default=[], help="More values for a sweep that exists.")
    add("--retry-failed", action="store_true", help="Start the failed trials of a sweep that exists again.")
    add("--dry-run", action="store_true", help="Print the trials and start nothing.")
    add_task(parser, nargs="?")
    add_ranks(parser)
    add_script(parser)


def run(options: Namespace, runs: Path) -> int:
    """Start or extend the sweep and print its name; with --dry-run, print its trials."""
    if options.dry_run:
        print(_listed(options, runs))
        return EXIT_FINISHED
    runs, name = start(options, runs)
    print(name, flush=True)
    return follow(runs, name) if options.follow else EXIT_FINISHED


def start(options: Namespace, runs: Path) -> tuple[Path, str]:
    """Start, continue or extend a sweep, for the command and for Python. Return the folder of runs, and its name."""
    from ..launcher.launches import NewSweep
    from ..launcher.sweep import check_free
    from ..run import folders

    if options.dry_run:
        raise Refused("dry_run is for the command line: train sweep … --dry-run")
    if _is_change(options):
        return runs, _change(options, runs)
    sweep, name = _asked(options, runs)
    if (runs / name / "run.json").exists():
        _continue(folders.find(runs, name), sweep)
        return runs, name
    folders.check_free(runs, name)
    check_free(runs, sweep.trials)
    launch = NewSweep(
        runs=str(runs), name=name, sweep=sweep.to_json(), keep_env=options.keep_env or [],
        command_line=str(sweep.launch["command_line"]),
    )  # fmt: skip
    warn(launch.start())
    from ..sweeps import kept

    screen.remark(_told(name, kept.read(folders.find(runs, name))))
    return runs, name


def _told(name: str, sweep: Sweep) -> str:
    drawn = f", drawn by chance from seed {sweep.space.seed}" if sweep.space.search else ""
    return f"{name}: {len(sweep.trials)} trials, {sweep.at_once} at once{drawn}; see: train ls {name}"


def _listed(options: Namespace, runs: Path) -> str:
    """Return what --dry-run prints."""
    if _is_change(options):
        raise Refused("--dry-run is for a new sweep; leave it out, or look: train ls NAME")
    sweep, _ = _asked(options, runs)
    lines = [f"{name}  {said(parameters)}" for name, parameters in sweep.trials.items()]
    at_once = f", {sweep.at_once} at once" if sweep.at_once else ""
    return "\n".join([*lines, f"{len(lines)} trials{at_once}; nothing was started"])


def said(parameters: Parameters) -> str:
    """Return parameters as text."""
    return " ".join(f"{name}={value}" for name, value in parameters.items())


def _is_change(options: Namespace) -> bool:
    return bool(options.add or options.retry_failed or (options.trials is not None and not options.search))


def _asked(options: Namespace, runs: Path) -> tuple[Sweep, str]:
    """Return the sweep that was asked for, and its name, after the checks that need no torch."""
    from ..run import folders
    from ..sweeps import kept
    from ..sweeps.space import Space, numbered

    _check_not_in_trial()
    request = request_of(options)
    check(options, request, runs)
    if options.task is not None and (runs / options.task / kept.FILE).exists():
        raise Refused(f"{options.task} is a sweep; more values: train sweep {options.task} --add NAME=VALUES")
    space = Space.read(
        grid=options.grid, search=options.search, repeat=options.repeat, draws=number("trials", options.trials, 1),
        seed=number("search-seed", options.search_seed),
    )  # fmt: skip
    _check_parameters(options, space)
    if options.metric is not None and not kept.Metric.read(options.metric).name:
        raise Refused(f"--metric {options.metric}: give the name of a metric, as in max:accuracy")
    name = options.name or folders.fresh_name(runs, options.module or Path(options.script or options.task).stem)
    cells = space.cells()
    launch = launch_of(options, request, runs, "").to_json() | {"runs": ""}
    sweep = kept.Sweep(
        id=secrets.token_hex(8), launch=launch, space=space, metric=options.metric or "",
        at_once=number("at-once", options.at_once, 1) or 0,
        trials=dict(zip(numbered(name, len(cells)), cells, strict=True)),
    )  # fmt: skip
    return sweep, name


def _check_not_in_trial() -> None:
    """Refuse a sweep of sweeps: a trial that starts a sweep."""
    from ..run import folders

    folder = Path(os.environ.get("TRAIN_RUN_DIR") or "/")
    if folders.record_of(folder.parent, folder.name).get("trial_of"):
        raise Refused(f"{folder.name} is a trial of a sweep and cannot start a sweep; give the outer one more values")


def _check_parameters(options: Namespace, space: Any) -> None:
    """Check the names and, as far as the task is not needed for that, the values of all parameters. Raises Refused."""
    from .. import config
    from ..errors import nearest

    names = [*space.grid, *space.search, *space.repeat]
    if options.task is None:
        words = " ".join([*options.arguments, options.on_restart or ""])
        for name in names:
            if name == "run" or f"{{{name}}}" not in words:
                raise Refused(
                    f"{name}: no argument of the script takes it; write {{{name}}} after --, as in --lr {{lr}}"
                )
        return
    known = config.fields()
    for name in names:
        if name in options.flags:
            raise Refused(f"--{name} {options.flags[name]}: the sweep sets {name}; leave one of them out")
        if name not in known and not name.startswith(("task.", "optim.args.")):
            raise Refused(f"unknown field {name}{nearest(name, known, otherwise='; see: train run --help')}")
    for cell in space.cells():
        config.check_flags({**options.flags, **cell})


def _continue(run: Run, asked: Sweep) -> None:
    """Continue a sweep that exists, if it is the one that was asked for."""
    from ..sweeps import kept

    if kept.find(run) is None:
        raise Refused(f"a run named {run.name} exists, and it is no sweep; choose another name")
    if not kept.read(run).wants(asked):
        raise Refused(
            f"{run.name} is a sweep with another space or other fields; choose another --name, or give it more "
            f"values: train sweep {run.name} --add NAME=VALUES"
        )
    _resume(run, at_once=asked.at_once)


def _change(options: Namespace, runs: Path) -> str:
    """Extend a sweep, or start its failed trials again. Returns its name."""
    from ..run import folders, states
    from ..sweeps import kept

    if options.task is None or options.grid or options.repeat or options.flags:
        what = "--add" if options.add else "--retry-failed" if options.retry_failed else "--trials"
        raise Refused(
            f"{what} is for a sweep that exists, which keeps its fields; give its name: train sweep NAME {what}"
        )
    run = folders.find_trusted(runs, options.task).by_path()
    failed = {}
    if options.retry_failed:
        found = kept.look_at_all(run, kept.read(run))
        failed = {
            one.name: len(one.record["attempts"]) if one.record else 0 for one in found if one.state == states.FAILED
        }

    def edit(sweep: Sweep) -> Sweep:
        draws = number("trials", options.trials, 1)
        if options.add or draws is not None:
            sweep = sweep.extended(sweep.space.extended(options.add, draws))
            from ..launcher.sweep import check_free

            new = {name: one for name, one in sweep.trials.items() if name not in before}
            check_free(runs, new)
            _check_new(sweep, new)
        return dataclasses.replace(sweep, retry={**sweep.retry, **failed})

    before = kept.read(run).trials
    _resume(run, edit, at_once=number("at-once", options.at_once, 1) or 0)
    return str(options.task)


def _check_new(sweep: Sweep, new: dict[str, Parameters]) -> None:
    from .. import config

    if sweep.launch["launch"] == "NewRun":
        for parameters in new.values():
            config.check_flags({**sweep.launch["flags"], **parameters})


def _resume(run: Run, edit: Any = None, at_once: int = 0) -> None:
    """Change a sweep, and make sure that its loop runs if it has trials to launch."""
    from ..launcher.launches import Resume
    from ..launcher.sweep import change
    from ..sweeps import kept

    def whole(sweep: Sweep) -> Sweep:
        sweep = edit(sweep) if edit is not None else sweep
        return dataclasses.replace(sweep, at_once=at_once or sweep.at_once)

    def forget(record: Any) -> None:
        retried = kept.read(run).retry
        before: Any = record.get(kept.NOT_STARTED) or {}
        record[kept.NOT_STARTED] = {name: why for name, why in before.items() if name not in retried}

    sweep = change(run, whole, forget)
    until = time.monotonic() + _PATIENCE
    while run.alive():
        if dict[str, Any](run.read()).get(kept.READ) == kept.stamp(run):
            screen.remark(f"{run.name} runs; see: train ls {run.name}")
            return
        if time.monotonic() > until:
            screen.remark(f"{run.name} has not read its new trials yet; see: train logs {run.name}")
            return
        time.sleep(0.1)
    is_done = all(one.state == "finished" for one in kept.look_at_all(run, sweep))
    if is_done and run.read_effective()["state"] == "finished":
        screen.remark(f"{run.name} has finished already; see: train ls {run.name}")
        return
    warn(Resume(runs=str(run.path.parent), name=run.name).start())
    screen.remark(_told(run.name, sweep))

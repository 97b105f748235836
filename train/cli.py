"""The command line: parse, call, print. No logic, and no torch before a command needs it.

Flags of Config's fields (`--optim.lr 0.1`) are taken out of the arguments first, so that argparse sees only what a
command itself knows; they may stand anywhere, are never abbreviated, and the last one wins.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import train
from train import screen
from train.errors import FINISHED, INTERRUPTED, REFUSED, Refused, nearest, one_line, shortened
from train.record import store
from train.record.best import checkpoint_named

COMMANDS = {
    "run": "train here and now; under torchrun: be one of its ranks",
    "launch": "start a run inside tmux and return; it outlives this shell",
    "ls": "list the runs and their state",
    "show": "everything about one run",
    "logs": "the output of a rank",
    "attach": "the live terminal of a run (detach: Ctrl-b d)",
    "stop": "save and stop a run; of a script: ask it by SIGTERM",
    "resume": "continue a stopped, interrupted or failed run",
    "rm": "delete runs that are not running",
    "keeper": "keep runs alive: resume what was interrupted, save all on SIGTERM",
    "eval": "evaluate a run's newest checkpoint",
    "export": "write a run's weights to .safetensors, .pt or .onnx",
    "bench": "measure this machine: bench checkpoint, ordered, resume, stop",
    "plot": "draw loss, learning rate and throughput of runs",
}
WITH_FIELDS = ("run", "launch", "resume")
"""Commands that take the fields of Config as flags."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refused(f"{one_line(message)}; see: {self.prog} --help")


def parser(command: str) -> argparse.ArgumentParser:
    """The parser of one command, without the fields of Config."""
    made = _Parser(
        prog=f"train {command}",
        description=COMMANDS[command][0].upper() + COMMANDS[command][1:] + ".",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    if command in ("run", "launch"):
        kwargs: dict[str, Any] = {"nargs": "?"} if command == "launch" else {}
        add("task", metavar="TASK", help="digits, images, text, fake, or the path of a Python file", **kwargs)
        add("--name", help="name of the run; default: the task and the time")
        add("--config", metavar="FILE", help="TOML file with fields; flags win over it")
        add("--init", metavar="FILE", help="start from exported weights (.safetensors or .pt)")
    if command == "run":
        add("--spawn", metavar="N", help="start N ranks on this machine")
    if command in ("launch", "resume"):
        add("--nproc", metavar="N|auto", help="ranks on this machine; auto: one per GPU")
        add("--gpus", metavar="N|IDS", help="a number of GPUs, or ids with a comma: 0,1 or 2,")
        add("--max-restarts", metavar="K", help="deaths in a row without a new checkpoint before giving up (3)")
        add("--follow", action="store_true", help="show progress and exit as the run does: 0, 3 or 75")
    if command == "launch":
        add("--script", metavar="FILE", help="launch this torchrun program instead of a TASK; its arguments after --")
        add("arguments", nargs="*", metavar="-- ARGS", help="arguments of --script")
    if command in ("show", "logs", "attach", "stop", "eval", "export"):
        add("name", metavar="NAME", help="a run; train ls lists them")
    if command == "resume":
        add("name", metavar="NAME", nargs="?", help="a run; train ls lists them")
        add("--all", action="store_true", help="every run that was interrupted, or stopped by a signal")
        add("--script", metavar="FILE", help="of a script's run: from now on this file, not the copy in its folder")
    if command in ("rm", "plot", "ls"):
        add("names", metavar="NAME", nargs="*" if command == "ls" else "+", help="runs, or quoted patterns: 'exp-*'")
    if command == "ls":
        add("--state", metavar="STATE", help="only these, with commas: running, stopped, interrupted, failed, …")
        add("--sort", metavar="BY", help="created (the default), name, state, step (most first), loss (lowest first)")
        add("--reverse", action="store_true", help="the other way round")
        add("-n", "--limit", metavar="N", help="at most so many: the newest, or with --sort the first ones")
    if command in ("ls", "show", "eval"):
        add("--json", action="store_true", help="for machines")
    if command == "logs":
        add("--rank", metavar="R", help="which rank (0)")
        add("--attempt", metavar="N|all", help="which attempt; default: the last")
        add("--follow", action="store_true", help="go on until the run ends")
    if command == "keeper":
        add("--once", action="store_true", help="resume what was interrupted, then exit")
    if command == "bench":
        subjects = ["checkpoint", "ordered", "resume", "stop"]
        add("subject", metavar="|".join(subjects), choices=subjects, help="what to measure")
        add("--mb", metavar="N", action="append", help="checkpoint: MB of state; may be repeated (100, 1000)")
        add("--samples", metavar="N", default="1000000000", help="resume: size of the virtual data set (1000000000)")
        add(
            "--times",
            metavar="N",
            help="repetitions; medians are shown (checkpoint 5, ordered 30, resume 25, stop 200)",
        )
    if command == "stop":
        add("--now", action="store_true", help="do not save; the last checkpoint stays")
    if command in ("eval", "export"):
        add("--checkpoint", metavar="STEP|best", help="the one of this step, or best; default: the newest whole one")
    if command in ("export", "plot"):
        suffixes = ".safetensors, .pt or .onnx" if command == "export" else ".png, .svg or .pdf"
        add("--to", metavar="FILE", required=True, help=f"the file to write: {suffixes}")
    add("--runs", metavar="DIR", help="where run folders live; default: $TRAIN_RUNS, else ./runs")
    if command in WITH_FIELDS:
        made.usage = made.format_usage().removeprefix("usage: ").rstrip() + " [--FIELD VALUE ...]"
    return made


def fields_help() -> str:
    """A paragraph a field, for --help."""
    import textwrap

    from train.config import fields, type_name

    lines = ["fields (flags here, keys of a --config file; task settings are --task.NAME):"]
    for info in fields().values():
        default = "" if info.default in (None, "") else f" [{str(info.default).lower()}]"
        lines.append(f"  --{info.name} {type_name(info.annotation)}{default}")
        lines += textwrap.wrap(info.help, 100, initial_indent="        ", subsequent_indent="        ")
    return "\n".join(lines)


def split(command: str, arguments: list[str], known: argparse.ArgumentParser) -> tuple[list[str], dict[str, str]]:
    """Separate the fields' flags from a command's own arguments.

    Raises:
        Refused: a flag is unknown or lacks its value.
    """
    own = {
        option.lstrip("-").replace("-", "_"): action for action in known._actions for option in action.option_strings
    }
    fields: set[str] = set()
    if command in WITH_FIELDS:
        from train import config

        fields = set(config.fields())
    rest: list[str] = []
    flags: dict[str, str] = {}
    index = 0
    while index < len(arguments):
        token = arguments[index]
        index += 1
        if not token.startswith("--"):
            rest.append(token)
            continue
        name, equals, value = token[2:].partition("=")
        name = name.replace("-", "_")
        if name in own:
            action = own[name]
            takes_value = action.nargs != 0
            if takes_value and not equals:
                if index == len(arguments) or arguments[index].startswith("--"):
                    raise Refused(f"--{name.replace('_', '-')} needs a value; see: train {command} --help")
                value, equals, index = arguments[index], "=", index + 1
            rest.append("--" + name.replace("_", "-") + equals + value)
            continue
        if command not in WITH_FIELDS or not (name in fields or name.startswith("task.")):
            choices = fields | {name.replace("_", "-") for name in own}
            hint = nearest(name, choices, f"; see: train {command} --help")
            raise Refused(f"unknown flag --{name}{hint}")
        if not equals:
            if index == len(arguments) or arguments[index].startswith("--"):
                raise Refused(f"--{name} needs a value; see: train {command} --help")
            value, index = arguments[index], index + 1
        flags[name] = value
    return rest, flags


def parse(command: str, arguments: list[str], known: argparse.ArgumentParser) -> tuple[Any, dict[str, str]]:
    """A command's own options and the fields' flags. What stands after `--` is a script's, untouched.

    Raises:
        Refused: something is unknown, lacks its value, or stands where it cannot.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    own, flags = split(command, arguments[:end], known)
    options = known.parse_args(own)
    if command == "launch" and options.script is not None:
        options.arguments = arguments[end + 1 :]
    elif arguments[end:]:
        raise Refused(f"what is -- for? only launch --script takes arguments after it; see: train {command} --help")
    return options, flags


def number(option: str, text: str | None, least: int = 0) -> int | None:
    """A whole number given to an option.

    Raises:
        Refused: it is none, or too small.
    """
    if text is None:
        return None
    if not text.isdecimal() or int(text) < least:
        raise Refused(f"--{option} {text}: must be a whole number of at least {least}")
    return int(text)


def main(argv: list[str] | None = None) -> NoReturn:
    """Run one command and exit as it says."""
    arguments = sys.argv[1:] if argv is None else argv
    if sys.stdout is None:  # closed by who called us: a file opened later must not take its place
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    screen.tolerate_any_locale()
    try:
        code = _main(arguments)
        sys.stdout.flush()
    except Refused as error:
        print(f"train: {error}", file=sys.stderr)
        code = REFUSED
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = FINISHED
    except OSError as error:  # what no command foresees: somebody else's run, a full or read-only disk
        where = f": {error.filename}" if error.filename else ""
        problem = shortened(f"{error.strerror or one_line(error)}{where}")
        remedy = "give a shorter one" if error.errno == errno.ENAMETOOLONG else "look at its owner and mode"
        print(f"train: {problem}; {remedy}", file=sys.stderr)
        code = REFUSED
    except UnicodeEncodeError as error:  # a name with letters that the locale has no bytes for
        what = shortened(ascii(error.object), 100)
        print(f"train: {what} has letters that this locale has not; use another: LC_ALL=C.UTF-8", file=sys.stderr)
        code = REFUSED
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("train: interrupted", file=sys.stderr)
        code = INTERRUPTED
    sys.exit(code)


def _main(arguments: list[str]) -> int:
    runs_first: list[str] = []
    while arguments and arguments[0].startswith("--runs"):  # before the command too
        taken = 1 if "=" in arguments[0] else 2
        runs_first, arguments = runs_first + arguments[:taken], arguments[taken:]
    if not arguments:
        raise Refused("which command? train --help lists them")
    command, rest = arguments[0], arguments[1:]
    if command in ("-h", "--help", "help"):
        print(overview())
        return FINISHED
    if command == "--version":
        print(train.__version__)
        return FINISHED
    if command not in COMMANDS:
        raise Refused(f"there is no command {command}{nearest(command, COMMANDS, '; train --help lists them')}")
    made = parser(command)
    if {"-h", "--help"} & set(rest[: rest.index("--")] if "--" in rest else rest):
        made.epilog = fields_help() if command in WITH_FIELDS else None
        made.print_help()
        return FINISHED
    options, flags = parse(command, runs_first + rest, made)
    runs = store.runs_folder(options.runs)
    return int(globals()[f"_{command}"](options, runs, flags))


def overview() -> str:
    """The text of `train --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "usage: train COMMAND … [--runs DIR]",
            "",
            "Exact, unkillable, observable training runs.",
            "",
            *lines,
            "",
            "train COMMAND --help says more. A first run: train launch digits --follow",
            "exit codes: 0 finished, 2 the request is wrong, 3 training failed, 75 stopped with a checkpoint",
        ]
    )


def _request(options: Any, flags: dict[str, str]) -> dict[str, Any]:
    for option in ("name", "config", "init"):
        if getattr(options, option) == "":
            raise Refused(f"--{option} is empty; give one, or leave it out")
    return {"task": options.task, "flags": flags, "config_file": options.config, "init": options.init}


def _run(options: Any, runs: Path, flags: dict[str, str]) -> int:
    request, spawn = _request(options, flags), number("spawn", options.spawn, 1)
    if options.name is not None and "TORCHELASTIC_RESTART_COUNT" not in os.environ:
        store.check_free(runs, options.name)
    _check_now(options.task, flags)
    if spawn is not None:
        from train.runs.spawn import warm_up

        warm_up()
    from train.runs import foreground
    from train.runs.admit import Request

    return foreground.run(runs, options.name, Request(**request), spawn)


def _launch(options: Any, runs: Path, flags: dict[str, str]) -> int:
    from train.runs import launch

    request, restarts = _request(options, flags), number("max-restarts", options.max_restarts)
    if (options.script is None) == (options.task is None):
        raise Refused("give a TASK, or --script FILE with its arguments after --; see: train launch --help")
    if options.script is None and options.arguments:
        raise Refused(f"what is {options.arguments[0]}? a TASK takes flags only; see: train launch --help")
    if options.script is not None:
        given = [name for name in flags if not name.startswith("watch.")]
        given += [name for name in ("config", "init") if getattr(options, name) is not None]
        if given:
            raise Refused(f"--{given[0]} is for tasks; arguments of a script stand after --")
        _check_values(flags)
        if not Path(options.script).is_file():
            raise Refused(f"--script {options.script}: there is no such file")
    else:
        _check_now(options.task, flags)
    name = options.name or store.fresh_name(runs, Path(options.script or options.task).stem)
    store.check_free(runs, name)
    warnings = launch.start(
        launch.Order(
            kind="script" if options.script else "new",
            runs=str(runs),
            name=name,
            request=request,
            flags=flags if options.script else {},
            script=[options.script, *options.arguments] if options.script else [],
            nproc=options.nproc,
            gpus=options.gpus,
            max_restarts=restarts,
        )
    )
    _warn(warnings)
    print(name, flush=True)
    return _follow(runs, name) if options.follow else FINISHED


def _check_now(task: str, flags: dict[str, str]) -> None:
    """Find what can be found wrong without torch, at once: the task's name and the fields' values."""
    from train import tasks

    tasks.locate(task)
    _check_values(flags)


def _check_values(flags: dict[str, str]) -> None:
    from train import config

    known = config.fields()
    for name, text in flags.items():
        if name in known:
            config.parse_value(name, known[name].annotation, text)
    if flags.get("steps", "none") != "none" and flags.get("epochs", "none") != "none":
        raise Refused("steps and epochs replace each other; give one of them")


def _warn(warnings: list[str]) -> None:
    for line in warnings:
        print(f"train: warning: {line}", file=sys.stderr)


def _follow(runs: Path, name: str) -> int:
    from train.runs.follow import follow

    return follow(store.find(runs, name))


def _resume(options: Any, runs: Path, flags: dict[str, str]) -> int:
    from train.runs import launch
    from train.runs.control import resumable

    restarts = number("max-restarts", options.max_restarts)
    if (options.name is None) == (not options.all):
        raise Refused("give the NAME of a run, or --all; train ls lists the runs")
    if options.all and (options.follow or flags or options.script is not None):
        raise Refused("--all takes neither --follow nor --script nor fields; resume that run by its name")
    if options.script is not None and not Path(options.script).is_file():
        raise Refused(f"--script {options.script}: there is no such file")
    names = [run.name for run in store.every(runs) if resumable(run)] if options.all else [options.name]
    code = FINISHED
    for name in names:
        try:
            run = store.find(runs, name)
            if run.state() == store.RUNNING:
                raise Refused(f"{name} is running; see: train show {name}")
            if run.state() == store.FINISHED and not {"epochs", "steps"} & set(flags):
                is_script = bool(run.read().get("script"))
                if options.script is not None and is_script:
                    raise Refused(f"{name} has finished already; a new run: train launch --script {options.script}")
                more = "" if is_script else f"; for more: train resume {name} --epochs N"
                print(f"{name} has finished already{more}", file=sys.stderr)
                continue
            order = launch.Order(
                kind="resume", runs=str(runs), name=name, flags=flags, nproc=options.nproc, gpus=options.gpus,
                max_restarts=restarts, script=[options.script] if options.script is not None else [],
            )  # fmt: skip
            _warn(launch.start(order))
            print(name, flush=True)
            if options.follow:
                return _follow(runs, name)
        except Refused as error:
            if not options.all:
                raise
            print(f"train: {name}: {error}", file=sys.stderr)
            code = REFUSED
    return code


def _ls(options: Any, runs: Path, flags: dict[str, str]) -> int:
    from train.record.table import listing
    from train.runs import select

    limit = number("limit", options.limit, 1)
    names = options.names
    records = []
    for run in select.matching(runs, names, must=False) if names else store.every(runs):
        try:
            records.append(run.shown())
        except Refused as error:
            print(f"train: {error}", file=sys.stderr)
    known = bool(records) and not names
    records = select.chosen(records, options.state, options.sort, limit, options.reverse)
    print(json.dumps(records, indent=1) if options.json else listing(records, runs, bool(names) or known))
    return FINISHED


def _show(options: Any, runs: Path, flags: dict[str, str]) -> int:
    from train.record import best
    from train.record.table import story

    run = store.find(runs, options.name)
    record = run.shown()
    if not record.get("script"):
        record |= best.facts(run)
    print(json.dumps(record, indent=1) if options.json else story(run))
    return FINISHED


def _logs(options: Any, runs: Path, flags: dict[str, str]) -> int:
    from train.runs.logs import ALL, print_log

    rank = number("rank", options.rank)
    attempt = ALL if options.attempt == "all" else number("attempt", options.attempt, 1)
    return print_log(store.find(runs, options.name), rank or 0, attempt, options.follow)


def _attach(options: Any, runs: Path, flags: dict[str, str]) -> int:
    from train.runs.launch import attach

    attach(store.find(runs, options.name))
    return FINISHED


def _stop(options: Any, runs: Path, flags: dict[str, str]) -> int:
    from train.runs.control import stop

    code, text = stop(store.find(runs, options.name), options.now)
    print(text, file=sys.stderr)
    return code


def _keeper(options: Any, runs: Path, flags: dict[str, str]) -> int:
    from train.runs.keeper import keep

    return keep(runs, options.once)


def _rm(options: Any, runs: Path, flags: dict[str, str]) -> int:
    from train.runs import select

    found = select.matching(runs, options.names)
    select.remove(found)
    if any(map(select.is_pattern, options.names)):  # which ones that were is not in the command
        print(f"removed {', '.join(run.name for run in found)}", file=sys.stderr)
    return FINISHED


def _eval(options: Any, runs: Path, flags: dict[str, str]) -> int:
    run = store.find(runs, options.name)
    wanted = checkpoint_named(run, options.checkpoint)
    from train.engine.export import evaluate_run

    step, samples, figures = evaluate_run(run, wanted)
    if options.json:
        print(json.dumps({"step": step, "samples": samples, "eval": figures}))
    else:
        print(f"step {step}, {samples} samples: " + "  ".join(f"{k} {v:.4f}" for k, v in figures.items()))
    return FINISHED


def _export(options: Any, runs: Path, flags: dict[str, str]) -> int:
    run = store.find(runs, options.name)
    wanted = checkpoint_named(run, options.checkpoint)
    from train.engine.export import export

    step = export(run, Path(options.to), wanted)
    print(f"wrote {options.to}: the weights of {run.name} after step {step}", file=sys.stderr)
    return FINISHED


def _bench(options: Any, runs: Path, flags: dict[str, str]) -> int:
    sizes = [number("mb", text, 1) or 1 for text in options.mb or ["100", "1000"]]
    times = number("times", options.times, 1)
    samples = number("samples", options.samples, 100_000) or 0
    runs.mkdir(parents=True, exist_ok=True)
    if options.subject == "resume":
        from train.bench import resume

        print(resume.bench(runs, samples, times or 25))
    elif options.subject == "ordered":
        from train.bench import ordered

        print(ordered.bench(runs, times or 30))
    elif options.subject == "stop":
        from train.bench import stop

        print(stop.bench(runs, times or 200))
    else:
        from train.bench import checkpoint

        print(checkpoint.bench(runs, sizes, times or 5))
    return FINISHED


def _plot(options: Any, runs: Path, flags: dict[str, str]) -> int:
    from train.record.plot import plot
    from train.runs import select

    plot(select.matching(runs, options.names), Path(options.to))
    print(f"wrote {options.to}", file=sys.stderr)
    return FINISHED


if __name__ == "__main__":
    main()

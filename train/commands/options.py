"""Arguments that several commands share, and the functions that read them."""

from __future__ import annotations

import fnmatch
import functools
import os
import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import screen
from ..errors import Refused, whole
from ..supervise.timeouts import WAIT_MINUTES
from .completion_values import checkpoint_steps, run_names, task_names, words
from .parser import Parser, decimal, number

if TYPE_CHECKING:
    from ..launcher.request import Request
    from ..run.run_folder import Run

MOST_NODES = 10_000
_LONGEST_WAIT = 1e6
"""Minutes; about two years."""


def add_name(parser: Parser, **kwargs: Any) -> None:
    """Add the NAME of a run."""
    parser.add_argument("name", metavar="NAME", help="Name of a run, as in train ls.", offer=run_names, **kwargs)


def add_names(parser: Parser, nargs: str) -> None:
    """Add the NAMEs of several runs."""
    text = "Names of runs, or patterns in quotes: 'exp-*'."
    parser.add_argument("names", metavar="NAME", nargs=nargs, help=text, offer=run_names)


def matching(runs: Path, names: list[str], must: bool = True) -> list[Run]:
    """Return the runs with these names, or that match these patterns (with *, ? or [ ]), each once.

    Args:
        must: whether to refuse a pattern that matches nothing.

    Raises:
        Refused: no run has this name, or nothing matches.
    """
    from ..run import folders
    from ..run.run_folder import Run

    found: dict[str, Run] = {}
    for name in names:
        if not set("*?[") & set(name) or (Run(runs / name).folder / "run.json").exists():
            matched = [folders.find(runs, name)]
        else:
            matched = [run for run in folders.every(runs) if fnmatch.fnmatchcase(run.name, name)]
        if must and not matched:
            raise Refused(f"no run in {runs} matches {name}; train ls lists the runs")
        found |= {run.name: run for run in matched}
    return list(found.values())


def add_task(parser: Parser, **kwargs: Any) -> None:
    """Add the task of a new run, its name and its configuration file."""
    add = parser.add_argument
    text = "A built-in task (digits, images, text, fake), or the path of a Python file."
    add("task", metavar="TASK", help=text, offer=task_names, **kwargs)
    add("--name", help="Name of the run. Default: the task and the time.")
    add("--config", metavar="FILE", help="TOML file with config fields. Flags win over the file.")


def add_ranks(parser: Parser) -> None:
    """Add the number of ranks, the GPUs and the restarts of a run in tmux."""
    add = parser.add_argument
    text = "Ranks on this machine; auto: one per GPU. Default: one per GPU of --gpus, else {}."
    usual = "as before" if parser.continues_run else "1"
    add("--nproc", metavar="N|auto", help=text.format(usual), offer=words("auto"))
    text = "Number of free GPUs, or their ids with a comma: 0,1 (or 2, for id 2 alone). Default: one per rank."
    add("--gpus", metavar="N|IDS", help=text)
    add_lease(parser)
    add("--queue", action="store_true", help="Wait in the queue until the GPUs, or cores, are free.")
    text = "Wait until these runs have finished, and then in the queue. If one fails or is stopped, this one stops."
    add("--after", metavar="NAME[,NAME]", help=text, offer=run_names)
    text = (
        "While another run of yours (mine), or of anybody (all), waits for its GPUs or cores: save, stop, and wait "
        "behind it. The run comes back by itself."
    )
    add("--gives-way", metavar="mine|all", help=text, offer=words("mine", "all"))
    text = "Show the progress until the run ends, then exit with its code: 0, 3 or 75."
    add("--follow", action="store_true", help=text)
    text = (
        "Maximum number of restarts in a row without a newer state; then the run fails. Default: 3; of a script 0, "
        "unless it has --on-restart or a session."
    )
    add("--max-restarts", metavar="K", help=text)
    text = "Keep this environment variable for resumes, too. May be given several times."
    add("--keep-env", metavar="NAME", action="append", help=text)


def add_lease(parser: Parser) -> None:
    """Add the way to start a run that does not reserve its GPUs."""
    text = "Do not reserve the GPUs or cores, and do not ask who uses them."
    parser.add_argument("--no-lease", action="store_true", help=text)


def waiting_of(options: Namespace, is_one_of_many: bool = False) -> dict[str, Any]:
    """Return what was said about leases and the queue, as fields of a launch.

    Args:
        is_one_of_many: Whether the run is one of those that the user resumes together. Then it waits for its GPUs.

    Raises:
        Refused: the options contradict each other.
    """
    after = list(filter(None, (options.after or "").split(",")))
    if options.after is not None and not after:
        raise Refused("--after is empty; give names of runs: --after NAME[,NAME]")
    if options.no_lease and (options.queue or after):
        raise Refused("--no-lease waits for nothing; leave it out, or --queue and --after")
    if options.gives_way not in (None, "mine", "all"):
        raise Refused(f"--gives-way {options.gives_way}: must be mine (to runs of yours) or all (to anybody's)")
    if options.no_lease and options.gives_way:
        raise Refused("--no-lease holds nothing that others wait for; leave it out, or --gives-way")
    queue = options.queue or bool(after) or (None if is_one_of_many else False)
    return {"lease": not options.no_lease, "queue": queue, "after": after, "gives_way": options.gives_way or ""}


def add_notify(parser: Parser) -> None:
    """Add where the notice of a run's end goes."""
    text = (
        "URL of a chat, or a command, that gets one line when the run ends, unless you stop it yourself. '': nobody. "
        "Default: $TRAIN_NOTIFY."
    )
    parser.add_argument("--notify", metavar="'COMMAND'", help=text)


def add_script(parser: Parser) -> None:
    """Add a script or a module in place of a task, with its arguments."""
    add = parser.add_argument
    add("--script", metavar="FILE", help="Start this torchrun program instead of a TASK.")
    add("--module", metavar="NAME", help="Start this module like python -m, instead of a TASK.")
    add_on_restart(parser)
    add_figures(parser)
    text = "Arguments of the --script or --module. {run} in them is replaced by the run folder."
    add("arguments", nargs="*", metavar="-- ARGS", help=text, offer=words())
    parser.rest = ("script", "module")


def add_on_restart(parser: Parser) -> None:
    """Add the arguments with which a script is started again."""
    text = (
        "Arguments of the script that a restart or resume adds, or replaces by name. {run}: the run folder. "
        "{newest:GLOB}: the newest match. '': the script continues by itself."
    )
    parser.add_argument("--on-restart", metavar="'ARGS'", help=text)
    parser.verbatim.add("--on-restart")


def add_figures(parser: Parser) -> None:
    """Add where the figures of a script are read from."""
    text = (
        "Read the metrics of a script from its output, by a regular expression with the group step and others, or "
        "from files: tensorboard:PATH. May be given several times."
    )
    parser.add_argument("--figures", metavar="REGEX", action="append", help=text)


def add_nodes(parser: Parser) -> None:
    """Add the options of a run on several machines."""
    add = functools.partial(parser.add_argument, section="several machines (run the command on each)")
    text = "Number of machines. MIN:MAX: machines may leave and join while MIN are there."
    add("--nnodes", metavar="N|MIN:MAX", help=text)
    add("--node-rank", metavar="R", help="Number of this machine, counted from 0.")
    add("--rendezvous", metavar="HOST:PORT", help="Where the machines meet: an address of node 0.")
    add("--wait-minutes", metavar="M", help="Minutes to wait for the other machines. Default: 30.")


def nodes_of(options: Namespace, before: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """Return the options of a run on several machines, as fields of nodes.Settings; None if none was given, {} for
    one machine.

    Args:
        before: values for the options that were left out.

    Raises:
        Refused: the options contradict each other, or the rendezvous is no address.
    """
    from ..nodes import address

    given = (options.nnodes, options.node_rank, options.rendezvous, options.wait_minutes)
    if given == (None,) * 4:
        return None
    if options.nnodes == "1":
        return {}
    before = before or {}
    least, most = _range(options.nnodes or f"{before.get('least', '')}:{before.get('most', '')}")
    node = before.get("node") if options.node_rank is None else number("node-rank", options.node_rank)
    rendezvous = options.rendezvous or before.get("rendezvous")
    if node is None or rendezvous is None:
        missing = "--node-rank R" if node is None else "--rendezvous HOST:PORT"
        raise Refused(f"--nnodes {options.nnodes} needs {missing} too; see: train launch --help")
    if node >= most:
        raise Refused(f"--node-rank {node}: give a number from 0 to {most - 1}, for --nnodes is {most}")
    try:
        place = address.parse(rendezvous)
    except ValueError as error:
        raise Refused(error) from None
    address.resolve(place)
    usual = str(before.get("wait_minutes", WAIT_MINUTES))
    wait = wait_minutes(usual if options.wait_minutes is None else options.wait_minutes)
    return {"least": least, "most": most, "node": node, "rendezvous": rendezvous, "wait_minutes": wait}


def wait_minutes(text: str) -> float:
    """Return the value of --wait-minutes."""
    return decimal("wait-minutes", text, 0.001, _LONGEST_WAIT)


def _range(text: str) -> tuple[int, int]:
    """Return the smallest and the largest number of machines of `--nnodes N|MIN:MAX`."""
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text, re.ASCII)
    least, most = (whole(found[1]), whole(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        given = f"--nnodes {text}" if text != ":" else "--nnodes is missing"
        raise Refused(f"{given}: give the number of machines, or MIN:MAX, such as 1:4")
    if most > MOST_NODES:
        raise Refused(f"--nnodes {text}: give at most {MOST_NODES} machines")
    return least, most


def add_json(parser: Parser) -> None:
    """Add output for programs."""
    parser.add_argument("--json", action="store_true", help="Print JSON, for programs.")


def add_checkpoint(parser: Parser) -> None:
    """Add the choice of a checkpoint."""
    text = "Checkpoint of this step, or the best one. Default: the newest whole one."
    parser.add_argument("--checkpoint", metavar="STEP|best", help=text, offer=checkpoint_steps)


def add_target(parser: Parser, *suffixes: str, required: bool = True, **kwargs: Any) -> None:
    """Add the file to write."""
    text = f"File to write: {', '.join(suffixes[:-1])} or {suffixes[-1]}."
    parser.add_argument("--to", metavar="FILE", required=required, help=text, **kwargs)


def request_of(options: Namespace) -> Request:
    """Return what to train.

    Raises:
        Refused: --name or --config is empty.
    """
    for option in ("name", "config"):
        if getattr(options, option, None) == "":
            raise Refused(f"--{option} is empty; give a value, or leave --{option} out")
    from ..launcher.request import Request

    return Request(options.task, flags=options.flags, config_file=options.config)


def check_now(request: Request, runs: Path | None, is_here: bool = True) -> None:
    """Check what can be checked without torch: the name of the task, the values of the fields, and files.

    Args:
        runs: folder of the runs, if the run may read files of this machine. The path that --init means is then
            written into the request.
        is_here: whether the run starts on this machine.

    Raises:
        Refused: one of them is wrong.
    """
    from .. import config, tasks

    tasks.locate(request.task)
    config.check_flags(request.flags)
    file = config.read_toml(Path(request.config_file)) if request.config_file is not None else {}
    flags = request.flags
    init = flags.get("init") or file.get("init")
    if is_here and flags.get("data.root") and request.task in tasks.BUILT_IN:
        tasks.data_root(flags["data.root"])  # a user's own task may create the folder
    if not is_here:  # here the launch itself checks this
        from ..launcher import unused_fields

        unused_fields.check_early(tasks.locate(request.task), request.flags, request.config_file)
    if isinstance(init, str) and init:
        request.flags = flags | {"init": _weights_at(init, runs) if runs is not None else init}


def _weights_at(text: str, runs: Path) -> str:
    """Return the path of the file that --init means, or of a checkpoint's folder: NAME, NAME@best or NAME@STEP.

    It ends with @ema for the average of the weights, which the best metric may have been measured with.

    Raises:
        Refused: neither a file nor a run has this name.
    """
    from ..run import best, folders
    from ..run.spec import read_spec

    name, sign, which = text.partition("@")
    is_run = bool(name) and (runs / name / "run.json").is_file()
    if Path(text).exists() and not (Path(text) / "run.json").exists():
        if is_run and not sign and "/" not in text:
            raise Refused(
                f"--init {text}: both a file and a run have this name; give ./{text}, {text}@best or {text}@STEP"
            )
        return str(Path(text).absolute())
    if sign and which == best.AVERAGE and Path(name).is_dir() and not is_run:  # from a config.toml
        return str(Path(text).absolute())
    if not is_run or (sign and not which):
        raise Refused(f"--init {text}: no file and no run has this name; give a FILE, NAME, NAME@best or NAME@STEP")
    run = folders.find(runs, name)
    wanted = best.checkpoint_named(run, read_spec(run), which or None, tell=screen.remark)
    step = wanted.step or run.newest_checkpoint
    if not step:
        raise Refused(f"--init {text}: {name} has no checkpoint yet")
    averaged = f"@{best.AVERAGE}" if wanted.weights("", screen.remark, f"--init {text}") else ""
    return f"{run.checkpoint(step).absolute()}{averaged}"


def check_notify(given: str | None) -> None:
    """Refuse a wrong --notify, or without it a wrong address in the environment."""
    from ..launcher import notices

    notices.of_launch(given, os.environ)


def warn(warnings: list[str]) -> None:
    """Print these warnings."""
    for line in warnings:
        screen.remark(f"warning: {line}")


def follow(runs: Path, name: str) -> int:
    """Show a run until it ends. Return its exit code."""
    from ..run import folders
    from ..views.follow import follow

    return follow(folders.find(runs, name))

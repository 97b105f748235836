"""Arguments that several commands take, and what they mean."""

from __future__ import annotations

import fnmatch
import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train import screen
from train.commands.completion_values import checkpoint_steps, run_names, task_names, words
from train.commands.parser import Parser, decimal, number
from train.errors import Refused, whole
from train.supervise.timeouts import WAIT_MINUTES

if TYPE_CHECKING:
    from train.run.run_folder import Run

MOST_NODES = 10_000
_LONGEST_WAIT = 1e6
"""Minutes: two years."""


def add_name(parser: Parser, **kwargs: Any) -> None:
    """The NAME of a run."""
    parser.add_argument("name", metavar="NAME", help="a run; train ls lists them", offer=run_names, **kwargs)


def add_names(parser: Parser, nargs: str) -> None:
    """The NAMEs of several."""
    text = "runs, or quoted patterns: 'exp-*'"
    parser.add_argument("names", metavar="NAME", nargs=nargs, help=text, offer=run_names)


def matching(runs: Path, names: list[str], must: bool = True) -> list[Run]:
    """The runs with these names, or that match these patterns (with *, ? or [ ]), each once.

    Args:
        must: whether a pattern that matches nothing is refused.

    Raises:
        Refused: there is no such run, or nothing matches.
    """
    from train.run import folders
    from train.run.run_folder import Run

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
    """What a new run is made of."""
    add = parser.add_argument
    text = "digits, images, text, fake, or the path of a Python file"
    add("task", metavar="TASK", help=text, offer=task_names, **kwargs)
    add("--name", help="name of the run; default: the task and the time")
    add("--config", metavar="FILE", help="TOML file with fields; flags win over it")


def add_ranks(parser: Parser) -> None:
    """How a launched run is spread and watched."""
    add = parser.add_argument
    text = "ranks on this machine; auto: one per GPU"
    add("--nproc", metavar="N|auto", help=text, offer=words("auto"))
    add("--gpus", metavar="N|IDS", help="a number of GPUs, or ids with a comma: 0,1 or 2,")
    add("--max-restarts", metavar="K", help="deaths in a row without a new checkpoint before giving up (3)")
    add("--follow", action="store_true", help="show progress and exit as the run does: 0, 3 or 75")


def add_nodes(parser: Parser) -> None:
    """How a run is spread over machines."""
    add = parser.add_argument
    add("--nnodes", metavar="N|MIN:MAX", help="machines; MIN:MAX: they may leave and join")
    add("--node-rank", metavar="R", help="which one this is, counted from 0; the others come to 0")
    add("--rendezvous", metavar="HOST:PORT", help="where they meet: an address of node 0")
    add("--wait-minutes", metavar="M", help="how long to wait for the others (30)")


def nodes_of(options: Namespace, before: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """The options of a run on several machines, as nodes.Settings has them; None without any, {} for one machine.

    Args:
        before: values of options that are left out.

    Raises:
        Refused: they contradict each other, or the rendezvous is no address.
    """
    from train.supervise import address

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
        raise Refused(f"--nnodes {options.nnodes} needs {missing} too: which machine this is, and where all meet")
    if node >= most:
        raise Refused(f"--node-rank {node}: the {most} nodes are counted from 0 to {most - 1}")
    try:
        place = address.parse(rendezvous)
    except ValueError as error:
        raise Refused(error) from None
    address.resolve(place)
    usual = str(before.get("wait_minutes", WAIT_MINUTES))
    wait = wait_minutes(usual if options.wait_minutes is None else options.wait_minutes)
    return {"least": least, "most": most, "node": node, "rendezvous": rendezvous, "wait_minutes": wait}


def wait_minutes(text: str) -> float:
    """The number of --wait-minutes."""
    return decimal("wait-minutes", text, 0.001, _LONGEST_WAIT)


def _range(text: str) -> tuple[int, int]:
    """The fewest and the most machines of `--nnodes N|MIN:MAX`."""
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text, re.ASCII)
    least, most = (whole(found[1]), whole(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        given = f"--nnodes {text}" if text != ":" else "--nnodes is missing"
        raise Refused(f"{given}: give the number of machines, or MIN:MAX, such as 1:4")
    if most > MOST_NODES:
        raise Refused(f"--nnodes {text}: give at most {MOST_NODES} machines")
    return least, most


def add_json(parser: Parser) -> None:
    """Output for programs."""
    parser.add_argument("--json", action="store_true", help="for machines")


def add_checkpoint(parser: Parser) -> None:
    """Which checkpoint of a run."""
    text = "the one of this step, or best; default: the newest whole one"
    parser.add_argument("--checkpoint", metavar="STEP|best", help=text, offer=checkpoint_steps)


def add_target(parser: Parser, *suffixes: str, required: bool = True) -> None:
    """The file to write."""
    text = f"the file to write: {', '.join(suffixes[:-1])} or {suffixes[-1]}"
    parser.add_argument("--to", metavar="FILE", required=required, help=text)


def request_of(options: Namespace) -> dict[str, Any]:
    """The fields of a request.Request without its ranks.

    Raises:
        Refused: an option is empty.
    """
    for option in ("name", "config"):
        if getattr(options, option) == "":
            raise Refused(f"--{option} is empty; give one, or leave it out")
    return {"task": options.task, "flags": options.flags, "config_file": options.config}


def check_now(request: dict[str, Any], runs: Path | None, is_here: bool = True) -> None:
    """Find what can be found wrong without torch, at once: the task's name, the fields' values, and files.

    Args:
        runs: the run folders, where files of this machine are read; the path that --init means is written into the
            request.
        is_here: whether the run begins on this machine.

    Raises:
        Refused: something is.
    """
    from train import config, tasks

    tasks.locate(request["task"])
    config.check_flags(request["flags"])
    file = config.read_toml(Path(request["config_file"])) if request["config_file"] is not None else {}
    flags, init = request["flags"], file.get("init")
    init = flags.get("init.file") or (init.get("file") if isinstance(init, dict) else None)
    if is_here and flags.get("data.root") and request["task"] in tasks.BUILT_IN:
        tasks.data_root(flags["data.root"])  # a task of the user's own may make the folder
    if not is_here:  # where it begins the launch says so
        from train.launcher import unused_fields

        unused_fields.check_early(tasks.locate(request["task"]), request["flags"], request["config_file"])
    if isinstance(init, str) and init:
        request["flags"] = flags | {"init.file": str(_weights_at(init, runs)) if runs is not None else init}


def _weights_at(text: str, runs: Path) -> Path:
    """The file that --init means, or the folder of a checkpoint: NAME, NAME@best or NAME@STEP.

    Raises:
        Refused: there is neither such a file nor such a run.
    """
    from train.run import best, folders

    name, sign, which = text.partition("@")
    is_run = bool(name) and (runs / name / "run.json").is_file()
    if Path(text).exists() and not (Path(text) / "run.json").exists():
        if is_run and not sign and "/" not in text:
            raise Refused(
                f"--init {text}: a file here and a run have this name; give ./{text}, or {text}@best or {text}@STEP"
            )
        return Path(text).absolute()
    if not is_run or (sign and not which):
        raise Refused(f"--init {text}: there is no such file, nor such a run: NAME, NAME@best or NAME@STEP")
    run = folders.find(runs, name)
    step = best.checkpoint_named(run, which or None, screen.remark) or run.newest_checkpoint
    if not step:
        raise Refused(f"--init {text}: {name} has no checkpoint yet")
    return run.checkpoint(step).absolute()


def warn(warnings: list[str]) -> None:
    """Print warnings."""
    for line in warnings:
        screen.remark(f"warning: {line}")


def follow(runs: Path, name: str) -> int:
    """Show a run until it ends, and end as it does."""
    from train.run import folders
    from train.views.follow import follow

    return follow(folders.find(runs, name))

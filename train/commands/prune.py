"""`train prune`: delete checkpoints of ended runs."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import format, screen
from ..checkpoint import manifest
from ..checkpoint.prune import keep_only
from ..cluster import engine
from ..errors import EXIT_FINISHED, Refused, nearest
from ..mirror import process, state
from ..monitor.status import RunStatus, here
from ..run import best, folders, states
from ..run.run_folder import Run
from ..sweeps import kept
from ..sweeps.space import sweep_name
from .completion_values import words
from .options import add_names, matching
from .parser import Parser

_LAST, _BEST = "last", "best"
_MOST_STEPS = 6
"""Maximum number of steps that are listed one by one."""

EXAMPLES = {
    "train prune 'exp-*'": "List and delete all checkpoints of these runs, except the last and the best one of each.",
    "train prune 'exp-*' --keep best --yes": "Keep only the best one of each. Do not ask.",
}


def add_arguments(parser: Parser) -> None:
    """Add the runs, what to keep, and --yes."""
    parser.epilog = (
        "last: the newest checkpoint. best: the best one by checkpoint.best, else by the\n"
        "loss. A stopped run and a run with a mirror always keep the last one, which a\n"
        "resume needs. Only your own runs that have finished, or that train stop has\n"
        "stopped, are pruned. If one of the runs cannot be pruned, nothing is deleted."
    )
    add_names(parser, "+")
    text = "Checkpoints that stay, with commas: last, best. Default: last,best."
    parser.add_argument("--keep", metavar="WHICH", default="last,best", help=text, offer=words(_LAST, _BEST))
    parser.add_argument("--yes", action="store_true", help="Do not ask.")


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is deleted of a run."""

    run: Run
    keep: dict[int, str]
    """Maps the steps that stay to why they stay."""
    steps: list[int]
    left: list[str]
    """Names of folders that interrupted saves and prunes left."""
    size: int

    def __str__(self) -> str:
        steps = [f"step {step}" for step in sorted(self.steps)]
        listed = ", ".join(steps if len(steps) <= _MOST_STEPS else [*steps[:2], "…", steps[-1]])
        what = [listed] * bool(steps) + ["parts of interrupted saves"] * bool(self.left)
        stay = ", ".join(f"step {step} ({why})" for step, why in sorted(self.keep.items())) or "no checkpoint"
        return f"{screen.name(self.run.name)}: deletes {' and '.join(what)}, {format.size(self.size)}; keeps {stay}"


def run(options: Namespace, runs: Path) -> int:
    """List the checkpoints to delete, ask, and delete them. Nothing is deleted if one of the runs is refused."""
    keep = _parsed(options.keep)
    plans = [_plan(run, keep) for run in matching(runs, options.names)]
    plans = [plan for plan in plans if plan.steps or plan.left]
    for plan in plans:
        _check_whole(plan)
    for plan in plans:
        screen.say(str(plan), sys.stdout)
    if not plans:
        screen.say("nothing to delete")
        return EXIT_FINISHED
    count = sum(len(plan.steps) for plan in plans)
    total = (
        f"{count} checkpoint{'s' if count != 1 else ''} of {len(plans)} run{'s' if len(plans) != 1 else ''}, "
        f"{format.size(sum(plan.size for plan in plans))}"
    )
    if not options.yes and not sys.stdin.isatty():
        raise Refused(f"{total}: nothing was deleted, because nobody can be asked here; to delete them, add --yes")
    if not options.yes and not _agrees(total):
        screen.say("nothing was deleted")
        return EXIT_FINISHED
    _delete(plans, keep)
    screen.say(f"deleted {total}")
    for plan in plans:
        if url := process.url_of(plan.run):
            screen.remark(f"the mirror {url} still has them; to delete them there: train mirror {plan.run.name}")
    return EXIT_FINISHED


def _parsed(text: str) -> frozenset[str]:
    names = frozenset(map(str.strip, text.split(",")))
    for name in sorted(names - {_LAST, _BEST}):
        raise Refused(f"--keep '{text}': give last, best, or last,best{nearest(name, (_LAST, _BEST))}")
    return names


def _agrees(total: str) -> bool:
    """Ask the user. Returns whether to go on."""
    print(f"deletes {total}; go on? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _plan(run: Run, keep: frozenset[str]) -> _Plan:
    """Return what is deleted of a run.

    Raises:
        Refused: the run may not be pruned, or nothing of it would stay.
    """
    one = here(run)
    _check(one)
    saved, stay = run.steps_saved(), dict[int, str]()
    if _BEST in keep and (found := best.best(run, one.spec.best_by)) is not None:
        stay[found.step] = f"best {found.metric} {format.figure(found.value)}"
    if saved and (_LAST in keep or one.state == states.STOPPED or process.url_of(run)):
        stay[saved[0]] = ", ".join(filter(None, [_LAST, stay.get(saved[0])]))
    if saved and not stay:
        raise Refused(f"no checkpoint of {run.name} was evaluated, so there is no best one; use --keep last")
    steps, left = [step for step in saved if step not in stay], manifest.left_over(run)
    needed = _needed(run.path.parent) if steps else {}
    for step in steps:
        if user := needed.get(os.path.realpath(run.checkpoint(step))):
            raise Refused(f"{run.name} is not pruned: {user} starts from its step {step}; first: train stop {user}")
    places = [*(run.checkpoint(step) for step in steps), *(run.checkpoints / name for name in left)]
    for folder in (run.path, run.checkpoints, *places):
        if folder != run.path and folder.is_symlink():  # it may lead into another run
            raise Refused(f"{folder} is a link, and only folders are pruned; move the folder to its place")
        if places and not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise Refused(f"{run.name} is not pruned: cannot delete in {folder}; check its owner and mode")
    return _Plan(run, stay, steps, left, sum(map(folders.size_of, places)))


def _needed(runs: Path) -> dict[str, str]:
    """Return the checkpoints that --init names and that are read later. Maps their paths to the name of the run.

    A launch reads them at once. A sweep launches trials later, and a submitted run is launched on its node.
    """
    found = {}
    for run in folders.every(runs):
        with contextlib.suppress(Refused, OSError):  # it is damaged, or removed meanwhile
            one = here(run)
            if one.record["attempts"] and not one.sweep:
                continue
            if not (one.is_alive or one.state == states.INTERRUPTED or states.rests_by_itself(one.record)):
                continue
            sweep, flags = kept.find(run), list[Mapping[str, Any]]()
            if sweep:
                flags = [sweep.launch.get("flags") or {}, *sweep.trials.values()]
            elif one.record.get("submitted"):
                flags = [engine.read(run.folder)["flags"]]
            for init in filter(None, (each.get("init") for each in flags)):
                found[os.path.realpath(init.removesuffix(f"@{best.AVERAGE}"))] = one.name
    return found


def _check(one: RunStatus) -> None:
    """Raise Refused if the run may not be pruned."""
    run, name, record = one.run, one.name, one.record
    if one.owner:
        raise Refused(f"{name} belongs to {one.owner}; only its owner can prune it")
    if record.get("submitted") or record.get("cluster"):
        raise Refused(f"{name} is a run of a cluster or of several machines, which is not pruned; set checkpoint.keep")
    if one.state not in (states.FINISHED, states.STOPPED) or states.rests_by_itself(record):
        what = f"{one.state} and continues by itself" if one.state == states.STOPPED else one.state
        raise Refused(f"{name} is {what}; only finished and stopped runs are pruned; to stop it: train stop {name}")
    if not run.was_started_here(record):
        raise Refused(f"{name} was not started here, or was copied or changed by hand; it is not pruned")
    if record.get("sweep"):
        raise Refused(f"{name} is a sweep; prune its trials: train prune '{name}-*'")
    sweep = Run(run.path.parent / sweep_name(name))
    if record.get(kept.OF) and sweep.alive():
        raise Refused(f"{name} is a trial of {sweep.name}, which is under way; first: train stop {sweep.name}")
    if url := process.url_of(run):
        mirrored = state.read(run)
        is_complete = mirrored.is_complete and mirrored.url == url and mirrored.step == run.newest_checkpoint
        if state.is_copying(run) or not is_complete:
            raise Refused(f"the mirror of {name} is not complete; first: train mirror {name}")


def _check_whole(plan: _Plan) -> None:
    """Raise Refused if a checkpoint that stays is damaged: one that goes may be the only whole one."""
    for step in plan.keep:
        try:
            manifest.verified(plan.run, step)
        except Refused as error:
            raise Refused(f"{plan.run.name} is not pruned: {error}") from None


def _delete(plans: Sequence[_Plan], keep: frozenset[str]) -> None:
    """Delete what was planned, with the locks of all runs held.

    Raises:
        Refused: a run was started or changed meanwhile, so nothing is deleted; or something could not be deleted.
    """
    with contextlib.ExitStack() as held:
        for plan in plans:
            lock = plan.run.acquire()
            if lock is None:
                raise Refused(f"{plan.run.name} was started meanwhile; nothing was deleted")
            held.callback(lock.release)
            if _plan(plan.run, keep) != plan:
                raise Refused(f"{plan.run.name} has changed meanwhile; nothing was deleted; try again")
        for plan in plans:
            keep_only(plan.run, plan.keep)
            plan.run.note(**best.facts(plan.run, here(plan.run).spec.best_by))
    for plan in plans:
        if {*plan.run.steps_saved()} != {*plan.keep} or manifest.left_over(plan.run):
            raise Refused(
                f"not all of {plan.run.name} could be deleted; check owner and mode of {plan.run.checkpoints}"
            )

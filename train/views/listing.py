"""`train ls` and `train show`: a table of runs, and the story of one."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import programs, screen
from ..errors import shortened
from ..format import ago, duration, figure, figures, size
from ..mirror import state as mirror
from ..monitor.status import RunStatus
from ..run import environment
from ..run.best import best, best_steps
from ..run.record import Attempt, Record
from ..run.run_folder import Run, seconds_of
from ..run.states import COPY, FAILED, INTERRUPTED, OTHER_FORMAT, RUNNING

COLUMNS = ("name", "state", "step", "ranks", "started", "result")
"""Columns of `train ls` unless --columns names others."""
BEST = "best."
"""Prefix of the columns with the best value of a metric."""
LOSSES = ("restarts", "seconds_lost")
"""Columns that `train ls` adds if a run of the list was restarted."""
OWN: Mapping[str, Callable[[RunStatus], Any]] = {
    "name": lambda one: one.name, "state": lambda one: one.state, "owner": lambda one: one.owner or None,
    "created": lambda one: one.record.get("created"), "started": lambda one: one.record.get("started"),
    "step": lambda one: one.step if one.total else one.step or None, "ranks": lambda one: one.record.get("world_size"),
    "args": lambda one: one.arguments or None, "restarts": lambda one: one.restarts,
    "seconds_lost": lambda one: one.seconds_lost, "user": lambda one: one.user or None,
    "machine": lambda one: one.machine or None, "gpus": lambda one: ",".join(one.gpus) or None,
    "waits_for": lambda one: one.waits_for or None, "size": lambda one: one.size,
}  # fmt: skip
"""Maps columns that are no metric and no field to their values."""


def _ago(stamp: Any) -> str:
    moment = seconds_of(stamp)
    if moment is None:
        return "?" if stamp else "-"
    return ago(time.time() - moment)


def with_reason(state: str, reason: str | None) -> str:
    """Return a text such as `failed: the loss is nan`. A reason that begins with the state stays as it is."""
    reason = str(reason or "")
    return reason if reason and reason.startswith(state) else f"{state}: {reason}" if reason else state


def end_of(attempt: Attempt, state: str) -> str:
    """Return how an attempt of a run in this state ended. An attempt whose agent was killed could not record it."""
    return attempt.get("end") or ("running" if state == RUNNING else "killed together with its agent")


def _place(one: RunStatus) -> str:
    """Return the step and the epoch that a run has reached; '' if they are unknown."""
    return one.done + (f"  epoch {one.record['epoch']}" if one.done and one.record["epoch"] else "")


def value(one: RunStatus, name: str, text: Callable[[float], str] = figure) -> Any:
    """Return a run's value of this name: a column, a metric of an evaluation or a config field; None if it has none.

    Args:
        text: formats the metrics of `result`.
    """
    if name in OWN:
        return OWN[name](one)
    if name == "result":
        return figures(one.result, text) or None
    parts = (
        lambda: one.metrics, lambda: {"loss": one.record.get("loss")}, lambda: one.record.get("last_figures") or {},
        lambda: one.config, lambda: {f"{BEST}{metric}": best for metric, best in one.best.items()},
    )  # fmt: skip
    return next((found[name] for part in parts if name in (found := part())), None)


def _cell(one: RunStatus, column: str) -> str:
    found = value(one, column)
    if column in ("created", "started"):
        return _ago(found)
    if column == "step":
        return one.done or "-"
    if column == "size":
        return size(found)
    return "-" if found in (None, "") else f"{found:.6g}" if isinstance(found, float) else str(found)


def listing(found: list[RunStatus], *, runs: Path, is_part: bool = False, columns: Sequence[str] = COLUMNS) -> str:
    """Return a table of these runs. `is_part`: whether other runs were filtered out."""
    if not found and is_part:
        return f"no run in {shortened(str(runs))} matches; to see all: train ls"
    if not found:
        return f"no runs in {shortened(str(runs))} yet; start one: train launch digits --follow"
    if columns == COLUMNS:
        lost, owners = any(one.restarts for one in found), any(one.owner for one in found)
        columns = (*COLUMNS, *(LOSSES if lost else ()), *(("owner",) if owners else ()))
    rows = [[column.upper() for column in columns]]
    rows += [[screen.printable(_cell(one, column)) for column in columns] for one in found]
    return screen.table(rows, screen.width(sys.stdout), spare=(3, 4) if columns[: len(COLUMNS)] == COLUMNS else ())


def facts(one: RunStatus) -> list[tuple[str, Any]]:
    """Return the facts about a run, each as a label and a value, which may be empty."""
    from . import settings  # it imports pydantic, which train ls does not need

    run, record, spec, program = one.run, one.record, one.spec, one.program
    submitted: Any = record.get("submitted") or {}
    sent, found, top = record.get("wandb") or {}, best(run, spec.best_by), ""
    if found is not None:
        others = [*best_steps(run, spec.best_by, spec.keep_best).items()][1:]
        next_best = "then " + ", ".join(f"step {step} ({figure(value)})" for step, value in others) if others else ""
        first = f"step {found.step}, {found.metric} {figure(found.value)}"
        top = "; ".join(filter(None, [first, next_best, found.warning]))
    return [
        ("owner", _owner(one)),
        (program.name, program.source(spec)),
        ("arguments", one.arguments),
        ("command", record.get("command_line")),
        ("set", settings.as_flags(spec)),
        ("on restart", program.on_restart(spec)),
        ("step", _place(one)),
        ("result", figures(one.result)),
        ("figures", "; ".join(filter(None, ["  ".join(spec.figures), record.get("figures_problem")]))),
        ("weights", record.get("weights_sha256")),
        ("submitted", " in ".join(submitted[key] for key in ("engine", "at") if submitted.get(key))),
        ("order", f"{spec.sampler}() of the task, {spec.samples} samples per epoch" if spec.sampler else None),
        ("ranks", record.get("world_size")),
        ("warning", record.get("unmet")),
        ("gpus", ",".join(one.gpus)),
        ("gave way", _gave_way(record)),
        ("machine", one.machine),
        ("user", one.user),
        ("image", record.get("image")),
        ("created", record.get("created")),
        ("ended", record.get("ended")),
        ("forked from", "; ".join(_ancestry(spec.forked_from))),
        ("started from", (record.get("init") or [""])[0]),
        ("versions", "  ".join(f"{name} {version}" for name, version in (record.get("versions") or {}).items())),
        ("git", record.get("git_revision")),
        ("folder", run.folder),
        ("checkpoints", ", ".join(f"step {step}" for step in sorted(run.steps_saved()))),
        ("best", top),
        ("mirror", mirror.text(run, record, str(spec.config.get(mirror.FIELD) or ""))),
        ("notices", record.get("notice_problem") or (record.get("notify") and f"to {record['notify']}")),
        ("wandb", sent.get("problem") or sent.get("url") or sent.get("id")),
    ]


def _gave_way(record: Record) -> str:
    given = record.get("gave_way") or {}
    times = given.get("times", 0)
    return f"{times} time{'s' if times > 1 else ''}, {duration(given.get('seconds', 0.0))} in all" if times else ""


def _owner(one: RunStatus) -> str:
    """Return the owner of another user's run, and what that means; '' for a run of this user."""
    return f"{one.owner}; you can only read this run" if one.owner else ""


def _ancestry(fork: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield a part of a line for each run from which this one descends."""
    child = ""
    while fork:
        edited = fork.get("edited") or ()
        code = f", other code than {fork['run']}: {', '.join(edited)}" if edited else ""
        yield f"{child}{fork['run']} after step {fork['step']}{code}"
        child, fork = f"{fork['run']} from ", fork.get("forked_from")


def story(one: RunStatus) -> str:
    """Return what `train show` prints: state, reason, next command, facts, and how each attempt ended."""
    run, record = one.run, one.record
    lines = [f"{screen.name(run.name)}: {with_reason(one.state, one.reason)}"]

    def line(label: str, value: object) -> None:
        if value not in (None, "", {}, []):
            lines.append(f"  {label:<12} {value}")

    line("next", one.next_command)
    if one.state == OTHER_FORMAT:
        line("owner", _owner(one))
        line("created", record.get("created"))
        line("folder", run.folder)
        return _wrapped(lines)
    for label, value in facts(one):
        line(label, value)
    if (saved := environment.read(run.folder)) is not None and saved.withheld:
        line("not kept", f"secrets: {', '.join(saved.withheld)}")
    lines += _attempts(record)
    line("restarts", one.restarts or None)
    if not one.program.reports_steps(record["attempts"]):
        line("steps redone", "-")
        line("time lost", "-")
        return _wrapped(lines)
    line("data", record.get("data_wait"))
    for reason in record.get("not_exact") or ():
        line("not exact", reason)
    line("skipped", _skipped(run, record.get("skipped") or {}))
    line("steps redone", one.account.redone)
    if whole := one.account.parts["lost"]:
        away, again = duration(whole - one.account.again), duration(one.account.again)
        line("time lost", f"{duration(whole)}: {away} until training continued, {again} for the redone steps")
    return _wrapped(lines)


def _attempts(record: Record) -> list[str]:
    """Return one line per attempt, then the last lines of the rank whose death ended the run."""
    lines = []
    for attempt in record["attempts"]:
        ranks = f"{attempt['world_size']} rank{'s' if attempt['world_size'] != 1 else ''}"
        steps, end = made(attempt), end_of(attempt, record["state"])
        lines.append(f"  attempt {attempt['number']:<4} {steps}, {ranks}, {with_reason(end, attempt.get('reason'))}")
        lines += [f"    | {text}" for text in attempt.get("edited") or ()]
    if record["attempts"] and record["state"] in (FAILED, INTERRUPTED, COPY):
        lines += [f"    | {text}" for text in record["attempts"][-1].get("last_lines") or ()]
    return lines


def _wrapped(lines: list[str]) -> str:
    columns = screen.width(sys.stdout)
    return "\n".join(screen.wrapped(screen.printable(text), columns, indent=15) for text in lines)


def _skipped(run: Run, counts: dict[str, int]) -> str:
    """Return how many samples could not be read, and where they are listed."""
    parts = [f"{count} sample{'s' if count > 1 else ''} of the {part} set" for part, count in counts.items()]
    return f"{', '.join(parts)} could not be read; see: {run.folder / 'skipped.jsonl'}" if parts else ""


def made(attempt: Attempt) -> str:
    """Return the steps of an attempt; if they are unknown, how long it ran."""
    if not programs.knows_steps(attempt):
        began, ended = seconds_of(attempt["started"]), seconds_of(attempt.get("ended"))
        return f"ran {duration(ended - began)}" if began and ended else f"started {_ago(attempt['started'])}"
    first, last = attempt["from_step"] or 0, attempt.get("to_step")
    if last is None:
        return f"from step {first + 1}"
    return f"steps {first + 1}-{last}" if last > first else f"no step after step {first}"

"""`train ls` and `train show`: a table of runs, and the story of one."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import screen
from ..errors import shortened
from ..format import ago, duration, figure, figures
from ..mirror import state as mirror
from ..run import environment, metrics
from ..run.best import best, best_steps
from ..run.record import Attempt, Record
from ..run.run_folder import Run, seconds_of
from ..run.spec import Spec, spec_of
from ..run.states import (
    CHECKING,
    COPY,
    CREATED,
    FAILED,
    FINISHED,
    INTERRUPTED,
    OTHER_FORMAT,
    QUEUED,
    RUNNING,
    STOPPED,
)
from ..supervise import programs
from . import time_spent

COLUMNS = ("name", "state", "step", "ranks", "started", "result")
"""Columns of `train ls` unless --columns names others."""
_RATES = (*metrics.Speed.__annotations__, "lr", "grad_norm")
"""Figures of a script that are no result."""
BEST = "best."
"""Prefix of the columns with the best value of a metric."""
LOSSES = ("restarts", "seconds_lost")
"""Columns that `train ls` adds if a run of the list was restarted."""
_MOST_FIGURES = 4
"""Maximum number of figures of a script that are shown as its result."""


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


def _figures(record: Record, text: Callable[[float], str] = figure) -> str:
    if measured := record.get("metrics"):
        return figures(measured | ({"loss": metrics.loss_of(record)} if "loss" in measured else {}), text)
    shown = {"loss": record.get("loss"), **(record.get("last_figures") or {})}
    names = [name for name in shown if name not in _RATES][:_MOST_FIGURES]
    return figures({name: shown[name] for name in names}, text)


def _done(record: Record) -> str:
    return f"{record['step']}/{record['total_steps']}" if record.get("total_steps") else str(record["step"] or "-")


def _place(record: Record) -> str:
    """Return the step and the epoch that a run has reached; '' if they are unknown."""
    if not record.get("total_steps") and not record["step"]:
        return ""
    return _done(record) + (f"  epoch {record['epoch']}" if record["epoch"] else "")


def value(record: Record, name: str, text: Callable[[float], str] = figure) -> Any:
    """Return a run's value of this name: a column, a metric of an evaluation or a config field; None if it has none.

    Args:
        text: formats the metrics of `result`.
    """
    columns = {column: record.get(column) for column in ("name", "state", "created", "started")}
    step = record["step"] if record.get("total_steps") else record["step"] or None
    columns |= {"step": step, "ranks": record.get("world_size"), "args": _arguments(record) or None}
    columns |= {"owner": record.get("owner"), "result": _figures(record, text) or None}
    columns |= {"restarts": record.get("restarts"), "seconds_lost": record.get("seconds_lost")}
    parts: tuple[Mapping[str, Any], ...] = (
        columns, record.get("metrics") or {}, {"loss": record.get("loss")}, record.get("last_figures") or {},
        record.get("config") or {}, {f"{BEST}{metric}": best for metric, best in (record.get("best") or {}).items()},
    )  # fmt: skip
    return next((part[name] for part in parts if name in part), None)


def _arguments(record: Record) -> str:
    """Return the arguments of a script, as a shell takes them."""
    return shlex.join(record.get("script_arguments") or ())


def _cell(record: Record, column: str) -> str:
    found = value(record, column)
    if column in ("created", "started"):
        return _ago(found)
    if column == "step":
        return _done(record)
    return "-" if found in (None, "") else f"{found:.6g}" if isinstance(found, float) else str(found)


def listing(records: list[Record], *, runs: Path, is_part: bool = False, columns: Sequence[str] = COLUMNS) -> str:
    """Return a table of these runs. `is_part`: whether other runs were filtered out."""
    if not records and is_part:
        return f"no run in {shortened(str(runs))} matches; to see all: train ls"
    if not records:
        return f"no runs in {shortened(str(runs))} yet; start one: train launch digits --follow"
    if columns == COLUMNS:
        more = (LOSSES if any(record.get("restarts") for record in records) else ()), ("owner",)
        columns = (*COLUMNS, *more[0], *(more[1] if any(record.get("owner") for record in records) else ()))
    rows = [[column.upper() for column in columns]]
    rows += [[screen.printable(_cell(record, column)) for column in columns] for record in records]
    return screen.table(rows, screen.width(sys.stdout), spare=(3, 4) if columns[: len(COLUMNS)] == COLUMNS else ())


def facts(run: Run, record: Record, spec: Spec) -> list[tuple[str, Any]]:
    """Return the facts about a run, each as a label and a value, which may be empty."""
    submitted: Any = record.get("submitted") or {}
    sent, found, top = record.get("wandb") or {}, best(run, spec.best_by), ""
    if found is not None:
        others = [*best_steps(run, spec.best_by, spec.keep_best).items()][1:]
        next_best = "then " + ", ".join(f"step {step} ({figure(value)})" for step, value in others) if others else ""
        first = f"step {found.step}, {found.metric} {figure(found.value)}"
        top = "; ".join(filter(None, [first, next_best, found.warning]))
    program = programs.of(spec)
    return [
        ("owner", _owner(record)),
        (program.name, program.source(spec)),
        ("arguments", _arguments(record)),
        ("on restart", program.on_restart(spec)),
        ("step", _place(record)),
        ("result", _figures(record)),
        ("figures", "; ".join(filter(None, ["  ".join(spec.figures), record.get("figures_problem")]))),
        ("weights", record.get("weights_sha256")),
        ("submitted", " in ".join(submitted[key] for key in ("engine", "at") if submitted.get(key))),
        ("order", f"{spec.sampler}() of the task, {spec.samples} samples per epoch" if spec.sampler else None),
        ("ranks", record.get("world_size")),
        ("machine", record.get("host")),
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
        ("wandb", sent.get("problem") or sent.get("url") or sent.get("id")),
    ]


def _owner(record: Record) -> str:
    """Return the owner of another user's run, and what that means; '' for a run of this user."""
    return f"{record['owner']}; you can only read this run" if record.get("owner") else ""


def _ancestry(fork: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield a part of a line for each run from which this one descends."""
    child = ""
    while fork:
        edited = fork.get("edited") or ()
        code = f", other code than {fork['run']}: {', '.join(edited)}" if edited else ""
        yield f"{child}{fork['run']} after step {fork['step']}{code}"
        child, fork = f"{fork['run']} from ", fork.get("forked_from")


def next_command(record: Record) -> str:
    """Return what a user can type next for a run in this state; '' if nothing.

    Args:
        record: run.json with the effective state.
    """
    if record.get("owner"):  # it belongs to another user
        return ""
    name, spec = shlex.quote(record["name"]), spec_of(record, {})
    program = programs.of(spec)
    watch = f"watch: train logs {name} --follow"
    resume = f"train resume {name}" + (" on each machine" if record.get("cluster") else "")
    again = "continue" if program.continues(spec) else "start again"
    changed, more = (
        program.new_code(spec, record["name"]),
        program.train_more(record["name"], record.get("reason") or ""),
    )
    new_code = f"; with changed code: {changed}" if changed else ""
    commands = {
        CHECKING: f"end its launch: train stop {name}",
        CREATED: watch,
        QUEUED: watch,
        RUNNING: f"{watch}; save and stop: train stop {name}",
        STOPPED: f"{again}: {resume}",
        INTERRUPTED: f"{again}: {resume}",
        COPY: f"adopt and continue: {resume} (this executes the code in the run folder)",
        OTHER_FORMAT: f"look: train logs {name}; remove: train rm {name}",
        FAILED: f"look: train logs {name}; try again: {resume}{new_code}",
        FINISHED: f"weights: train export {name} --to {name}.safetensors; train more: {more}" if more else "",
    }
    return commands.get(record["state"], "")


def story(run: Run, record: Record, spec: Spec) -> str:
    """Return what `train show` prints: state, reason, next command, facts, and how each attempt ended.

    Args:
        record: run.json with the effective state.
    """
    lines = [f"{screen.name(run.name)}: {with_reason(record['state'], record.get('reason'))}"]

    def line(label: str, value: object) -> None:
        if value not in (None, "", {}, []):
            lines.append(f"  {label:<12} {value}")

    line("next", next_command(record))
    if record["state"] == OTHER_FORMAT:
        line("owner", _owner(record))
        line("created", record.get("created"))
        line("folder", run.folder)
        return _wrapped(lines)
    for label, value in facts(run, record, spec):
        line(label, value)
    if (saved := environment.read(run.folder)) is not None and saved.withheld:
        line("not kept", f"secrets: {', '.join(saved.withheld)}")
    lines += _attempts(record)
    if not programs.of(spec).reports_steps(record["attempts"]):
        line("restarts", time_spent.restarts(record) or None)
        line("steps redone", "-")
        line("time lost", "-")
        return _wrapped(lines)
    line("data", record.get("data_wait"))
    for reason in record.get("not_exact") or ():
        line("not exact", reason)
    line("skipped", _skipped(run, record.get("skipped") or {}))
    account = time_spent.of_run(run, record)
    line("restarts", time_spent.restarts(record) or None)
    line("steps redone", account.redone)
    if whole := account.parts["lost"]:
        away, again = duration(whole - account.again), duration(account.again)
        line("time lost", f"{duration(whole)}: {away} until training continued, {again} for the redone steps")
    return _wrapped(lines)


def _attempts(record: Record) -> list[str]:
    """Return one line per attempt, then the last lines of the rank whose death ended the run."""
    lines = []
    for attempt in record["attempts"]:
        ranks = f"{attempt['world_size']} rank{'s' if attempt['world_size'] != 1 else ''}"
        made, end = _made(attempt), end_of(attempt, record["state"])
        lines.append(f"  attempt {attempt['number']:<4} {made}, {ranks}, {with_reason(end, attempt.get('reason'))}")
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


def _made(attempt: Attempt) -> str:
    """Return the steps of an attempt; if they are unknown, how long it ran."""
    if not programs.knows_steps(attempt):
        began, ended = seconds_of(attempt["started"]), seconds_of(attempt.get("ended"))
        return f"ran {duration(ended - began)}" if began and ended else f"started {_ago(attempt['started'])}"
    first, last = attempt["from_step"] or 0, attempt.get("to_step")
    if last is None:
        return f"from step {first + 1}"
    return f"steps {first + 1}-{last}" if last > first else f"no step after step {first}"

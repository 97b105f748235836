"""Checks a sweep before its first trial, changes one that exists, and launches and stops its trials."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from .. import signals
from ..build import cores
from ..code import changes
from ..errors import Refused
from ..gpus import VISIBLE
from ..run import durable, folders, states
from ..run.owner import TrustedRun
from ..run.record import Record
from ..run.run_folder import Run
from ..supervise import attempts
from ..sweeps import kept
from ..sweeps.kept import Sweep
from ..sweeps.space import Parameters
from . import leasing
from .request import ALONE, Launch, Plan
from .stopping import stop_and_wait

_OF_CODE = (
    "task", "task_source", "task_sha256", "task_imports", "task_watched", "script", "script_module",
    "script_arguments", "script_files", "cwd", "versions", "git_revision",
)  # fmt: skip
"""Fields of run.json of a trial that its sweep has, too."""
_METRIC = "early_stopping.metric"
"""The field by which the check finds out whether evaluations give a metric. Trials do not get it."""


def launch_of(sweep: Sweep, runs: Path, name: str, rung: int = 0) -> dict[str, Any]:
    """Return the launch of a trial as JSON: a parameter is a flag of a task, or stands for `{name}` in arguments of a
    script."""
    parameters = sweep.trials[name]
    content = {**sweep.launch, "runs": str(runs), "name": name, "trial_of": sweep.id, "rung": rung}
    if content["launch"] == "NewRun":
        content["flags"] = {**sweep.defaults, **content["flags"], **parameters}
    else:
        content["arguments"] = [_filled(word, parameters) for word in content["arguments"]]
        if content["on_restart"]:
            content["on_restart"] = _filled(content["on_restart"], parameters)
    return content


def _filled(word: str, parameters: Parameters) -> str:
    names = "|".join(map(re.escape, parameters))  # in one pass: a value may contain {name} itself
    return re.sub(rf"\{{({names})\}}", lambda match: parameters.get(match[1], match[0]), word)


def prepare(sweep: Sweep, runs: Path, *, made: Callable[[dict[str, Any]], Launch]) -> Plan:
    """Check the first trial as its launch does, and the fields of all others. Fills in what the user left open.

    Args:
        made: Makes a launch from JSON.

    Raises:
        Refused: a trial is not possible, or no evaluation gives the metric.
    """
    import torch

    is_task = sweep.launch["launch"] == "NewRun"
    outer, here = os.environ.get(VISIBLE), torch.cuda.device_count()
    first = launch_of(sweep, runs, next(iter(sweep.trials)))
    if is_task and sweep.metric:
        first["flags"] |= {_METRIC: sweep.metric.removeprefix("last:"), "early_stopping.patience": "1"}
    try:
        plan = made(first).check()
    except Refused as error:
        raise Refused(str(error).replace(f"--{_METRIC}", "--metric") if sweep.metric else error) from None
    leasing.check_waits(made(first), plan.record)
    is_on_cpu = is_task and plan.config.device == "cpu"
    free = 1 if is_on_cpu or "," in (sweep.launch["gpus"] or "") else here // plan.ranks
    at_once = sweep.at_once or max(free, 1)
    metric, defaults = sweep.metric or "loss", dict[str, str]()
    if is_task:
        _check_fields(sweep, runs, plan)
        metric, defaults = sweep.metric or plan.config.checkpoint.best or "loss", {}
        if "checkpoint.keep" not in plan.record["set_by_user"]:
            defaults["checkpoint.keep"] = "1"
        if "cpu_threads" in plan.record["chosen"]:
            defaults["cpu_threads"] = str(max(1, plan.config.cpu_threads // at_once))
    record = {name: plan.record[name] for name in _OF_CODE if name in plan.record}
    files: dict[str, str | bytes] = {"task.py": plan.files["task.py"]} if "task.py" in plan.files else {}
    threads = 0 if is_task or at_once == 1 else cores.per_rank(at_once * plan.ranks)
    files_read = _read_by(record, sweep.launch)
    kept_as = dataclasses.replace(
        sweep, by=metric, defaults=defaults, at_once=at_once, threads=threads, files=files_read
    )
    if not is_task:
        record["script_arguments"] = sweep.launch["arguments"]
    record |= {
        "sweep": sweep.id, "on_restart": [], "total_steps": len(sweep.trials),
        "watch": {}, "expects_session": False,
    }  # fmt: skip
    files[kept.FILE] = kept_as.to_text()
    return Plan(files=files, record=record, warnings=plan.warnings, ranks=1, visible=outer)


def _read_by(record: Mapping[str, Any], launch: Mapping[str, Any]) -> dict[str, str]:
    """Map the files that each trial reads at its launch to their digests. The task's file itself is kept as a copy."""
    parts = (record.get(name) or {} for name in ("task_imports", "task_watched", "script_files"))
    found = {path: digest for part in parts for path, digest in part.items()}
    if config := launch.get("config_file"):
        found[config] = changes.digest(Path(config))
    return found


def _check_fields(sweep: Sweep, runs: Path, plan: Plan) -> None:
    """Check the fields of all trials, given the plan of the first one, without building their data again."""
    from .. import config as configuration
    from ..build import objects
    from . import rungs
    from .batches import cut_batch

    if plan.config.checkpoint.mirror:
        raise Refused("--checkpoint.mirror: the trials of a sweep cannot share one mirror; leave it out")
    for name, parameters in sweep.trials.items():
        launch = launch_of(sweep, runs, name)
        try:
            config = configuration.resolve(
                launch["flags"], config_file=launch["config_file"], settings=plan.task.Settings,
                defaults=plan.task.DEFAULTS, task_file=plan.task.file,
            )  # fmt: skip
            cut_batch(config, plan.ranks, ALONE)
            if sweep.rungs:
                cut = objects.plan_of(config, plan.record["samples"])
                rungs.check(sweep.rungs, plan.task, config, cut=cut, has_evaluation=plan.has_evaluation)
        except Refused as error:
            said = " ".join(f"{field}={value}" for field, value in parameters.items())
            raise Refused(f"{error} ({name}: {said})") from None


def prepare_again(run: TrustedRun, record: Record, flags: Mapping[str, str]) -> Plan:
    """Check a sweep that continues. Raises Refused."""
    if flags:
        raise Refused(f"--{next(iter(flags))}: the trials of a sweep keep their fields; start another sweep")
    kept.read(run)
    return Plan(files={}, record={}, warnings=[], ranks=1, visible=record.get("gpus"))


def change(run: Run, edit: Callable[[Sweep], Sweep], record_too: Callable[[Record], None] | None = None) -> Sweep:
    """Change sweep.json of a run. Returns its new content.

    Args:
        record_too: Changes run.json in the same step.

    Raises:
        Refused: `edit` refuses, or a file cannot be read.
    """
    made: list[Sweep] = []

    def write(record: Record) -> None:
        was_own = run.was_started_here(record)
        made.append(edit(kept.read(run)))
        durable.write_atomically(run.folder / kept.FILE, made[0].to_text())
        if was_own:
            record.update(run.signature(record))  # type: ignore[typeddict-item]
        if record_too is not None:
            record_too(record)

    run.update(write)
    return made[0]


def check_free(runs: Path, names: Iterable[str]) -> None:
    """Check that no run has one of these names. Raises Refused."""
    for name in names:
        folders.check_free(runs, name)


def stop_trials(run: Run, *, now: bool = False) -> list[str]:
    """Stop the trials of a sweep that run, and wait until they have ended. Returns their names.

    Until the sweep is resumed, nothing resumes them, nor those whose processes have died.
    """
    every = kept.own_runs(run)
    live = [one for one in every if one.alive()]
    for one in live:
        with contextlib.suppress(OSError):
            one.ask_stop(states.NOW if now else states.OF_SWEEP)
    for one in live:
        stop_and_wait(one, states.NOW if now else states.OF_SWEEP)
    names = [one.name for one in live]
    for one in every:
        record = one.read_effective()
        is_changed = record["state"] in (states.INTERRUPTED, states.CREATED) or states.rests_by_itself(record)
        # NOW itself says that its user wants it to stay stopped
        is_changed |= now and one.name in names and record["state"] == states.STOPPED
        if is_changed and (lock := one.acquire()) is not None:
            attempts.record_end(one, states.STOPPED, reason="stopped (with its sweep)", by=signals.SWEEP)
            lock.release()
    return names

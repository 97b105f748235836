"""Prepares a fork: a new run that continues from a checkpoint of another run, and what it takes from that run.

The new run trains with the copy of the task in that run, or with another version of the task's file. Without a
checkpoint it starts at step 0.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from .. import config as configuration
from ..build.objects import config_of, task_of
from ..code.source import Source, of_task
from ..config import Config
from ..config.resolve import check_lasts
from ..errors import Refused
from ..run.owner import TrustedRun
from ..run.run_folder import Run
from ..run.spec import spec_of
from ..tasks import Task
from ..tasks import load as load_task
from . import checks
from .case import Case, Kind, Past
from .request import Plan, scratch_run_dir, set_by_user
from .unused_fields import asked


@scratch_run_dir()
def prepare_fork(own: TrustedRun, step: int, flags: dict[str, str], ranks: int, file: str | None = None) -> Plan:
    """Check a new run that continues from a checkpoint of this one, with these changes.

    Args:
        step: Step of the checkpoint; 0: the new run starts at the beginning.
        file: Another version of the task; None: the run's own copy.

    Raises:
        Refused: it cannot continue so.
    """
    record, run = own.read(), own.by_path()
    spec = spec_of(record, own.read_config())
    given = Path(file) if file is not None else None
    task = task_of(run, spec) if given is None else load_task(str(given))  # not both: modules would hide each other
    source = None if given is None else of_task(task.file, given.parent)
    before, warnings = (config_of(run, task), []) if source is None else _config_for(run, task, source, flags)
    config = _config(run, step, task, before, flags)
    is_other = "batch_size" in flags or ranks != record["world_size"]
    if is_other and "micro_batch_size" not in flags and "micro_batch_size" in spec.chosen:
        config.micro_batch_size = None
    case = Case(
        kind=Kind.FORK, task=task, config=config, asked=asked(flags), local=ranks, source=source, given=given,
        past=Past(run, spec, record, step, before, flags), reads=spec.has_effect if source is None else source.reads,
        record={"cwd": record.get("cwd"), "chosen": list(spec.chosen), "step": step}, warnings=warnings,
    )  # fmt: skip
    checks.run(case)
    case.record["set_by_user"] = set_by_user(flags, before=spec.set_by_user)
    known = {"task_sha256": spec.task_sha256, "edited": case.edited}
    case.record["forked_from"] = spec.forked_at(run.name, step, **known)
    return case.to_plan()


def _config_for(run: Run, task: Task, source: Source, flags: dict[str, str]) -> tuple[Config, list[str]]:
    """Return the fields of a run for another version of its code, and warnings. The code in the run is not executed.

    Raises:
        Refused: a new setting has no value.
    """
    flat = configuration.read_flat(run.folder / "config.toml")
    settings = {f"task.{one.name}" for one in dataclasses.fields(task.Settings)} if task.Settings is not None else set()
    warnings, file = list[str](), task.file
    gone = sorted(name for name in flat if name.startswith("task.") and name not in settings)
    for name in gone:
        warnings.append(f"{name} = {flat[name]} of {run.name} is dropped: Settings in {file.name} has no such field")
    new = sorted(settings - flat.keys())
    flat = {name: value for name, value in flat.items() if name not in gone}
    given = {name: text for name, text in flags.items() if name in new}
    before = configuration.with_flags(given, settings=task.Settings, task_file=task.file, flat=flat)
    now = configuration.to_flat(before)
    for name in new:
        if name not in flags:
            warnings.append(f"{name} = {now[name]} is new: the default in {file.name}")
    return before, warnings + _hidden(run, task, source, now, flags)


def _hidden(run: Run, task: Task, source: Source, now: dict[str, Any], flags: dict[str, str]) -> list[str]:
    """Return warnings about edited defaults in the file that do not count, because the forked run sets the fields."""
    kept = run.folder / "task.py"
    old = Source(kept.read_bytes(), list, "task").defaults() if kept.exists() else {}
    new = source.defaults() | task.DEFAULTS
    return [
        f"{name} stays {now[name]} as in {run.name}, though {task.file.name} says {value} now; "
        f"to change: --{name} {value}"
        for name, value in new.items()
        if name in now and value not in (now[name], old.get(name, value), ...) and name not in flags
    ]


def _config(run: Run, step: int, task: Task, before: Config, flags: dict[str, str]) -> Config:
    """Return the configuration of a fork with these changes.

    Raises:
        Refused: a fork cannot have them.
    """
    settings, flat = task.Settings, configuration.to_flat(before)
    config = configuration.with_flags(flags, settings=settings, task_file=task.file, flat=flat)
    check_lasts(config, settings)
    if step and config.optim.name != before.optim.name:
        way = f"start a new run with its weights: --init {run.name}@{step}"
        raise Refused(f"--optim.name {config.optim.name} cannot load the state of {before.optim.name}; {way}")
    if step and config.overfit != before.overfit:
        raise Refused(f"a fork cannot change --overfit; start a new run with its weights: --init {run.name}@{step}")
    if config.data.seed is None:  # --data.seed none
        config.data.seed = config.seed
    if step:
        config.init = config.init_skip = ""  # the weights come from the checkpoint
    if config.micro_batch_size == "auto":
        raise Refused("--micro_batch_size auto does not work for a fork; give a number")
    if config.precision == "auto":
        raise Refused(f"--precision auto does not work for a fork; give {before.precision}, or another one")
    return config

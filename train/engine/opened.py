"""A run folder read back into what trains: its task, its configuration, its data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from train import config as configuration
from train.config import Config
from train.data import fingerprint
from train.engine import build
from train.errors import Refused, one_line
from train.record.store import Run
from train.tasks import Task, load

_SAID = 3
"""Differences of the data that are named."""


def task_of(run: Run) -> Task:
    """The task of a run: the built-in one, or the copy in its folder.

    Raises:
        Refused: the copy is gone or broken.
    """
    record = run.read()
    if record.get("script"):
        raise Refused(f"{run.name} runs a script of its own ({record['script']}), not a task")
    if not record.get("task"):
        raise Refused(f"{run.folder / 'run.json'} names no task; put it back")
    if record["task"] != "task.py":
        return load(record["task"])
    source = Path(record["task_source"])
    if not (run.folder / "task.py").is_file():
        raise Refused(f"{run.folder / 'task.py'} is missing; put the task's copy back")
    return load("task.py", run.folder / "task.py", source.parent if source.parent.is_dir() else None)


def config_of(run: Run, task: Task) -> Config:
    """The resolved configuration in the run folder."""
    return configuration.from_toml(run.folder / "config.toml", task.Settings)


def data_differs(run: Run, task: Task, config: Config, train_set: Any, eval_set: Any) -> str:
    """In what these data differ from those that a run began with; '' where they do not, or it is not known.

    Raises:
        Refused: what is known of the first ones is damaged.
    """
    then = fingerprint.recorded(run.folder)
    if then is None or then["format"] != fingerprint.FORMAT:
        return ""
    said = fingerprint.differences(then, build.fingerprint(task, config, train_set, eval_set))
    more = f"; and {len(said) - _SAID} more differences" if len(said) > _SAID else ""
    return one_line("; ".join(said[:_SAID]) + more)

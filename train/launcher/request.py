"""What a user asks for, and the task and the configuration that it makes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from train import config as configuration
from train.config import Config
from train.errors import Refused
from train.tasks import Task, load

ALONE = range(1, 2)
"""One machine."""


@dataclasses.dataclass
class Request:
    """What the user asked for, as text: it travels from `train launch` to the process that imports torch."""

    task: str
    flags: dict[str, str]
    config_file: str | None = None
    init: str | None = None
    ranks: int = 1
    """On this machine."""
    nodes: range = ALONE
    """Numbers of machines that it may have, each with so many ranks."""
    copy: str | None = None
    """The file of the task as it was when the run was handed over; modules beside the original are still found."""


def resolve(request: Request) -> tuple[Task, Config]:
    """The task and the configuration that defaults, file and flags make.

    Raises:
        Refused: something in them is unknown or wrong.
    """
    task = task_of(request.task, request.copy)
    fields = configuration.fields()
    own = {f"task.{name}": hint for name, hint in settings_types(task).items()}
    flat: dict[str, Any] = {"epochs": fields["epochs"].default}
    flat = configuration.layer(dict(task.DEFAULTS), task.Settings, f"DEFAULTS in {task.file}: ", flat)
    configuration.build(flat, task.Settings, f"{task.file}: ", partial=True)
    if request.config_file is not None:
        source = f"{request.config_file}: "
        tree = configuration.flatten(configuration.read_toml(Path(request.config_file)), source)
        # checked alone first, so that a message names the file and not the flags over it
        alone = configuration.layer(tree, task.Settings, source, flat)
        configuration.build(alone, task.Settings, source, partial=True)
        flat = alone
    flat = configuration.layer(parsed(request.flags, own, task), task.Settings, "", flat)
    config = configuration.build(flat, task.Settings)
    if config.data.root:
        config.data.root = str(Path(config.data.root).absolute())
    configuration.check_lasts(config, task.Settings)
    return task, config


def task_of(name: str, copy: str | None) -> Task:
    """The task that a request names; of a copy, with the modules beside the original.

    Raises:
        Refused: as `load`.
    """
    return load(name) if copy is None else load(name, Path(copy), Path(name).absolute().parent)


def settings_types(task: Task) -> dict[str, Any]:
    import typing

    if task.Settings is None:
        return {}
    with configuration.of_settings(f"Settings in {task.file}"):
        hints = typing.get_type_hints(task.Settings, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(task.Settings)}


def parsed(flags: dict[str, str], own: dict[str, Any], task: Task) -> dict[str, Any]:
    known = {name: info.annotation for name, info in configuration.fields().items()} | own
    for name in flags:
        if name not in known:
            from train.errors import nearest

            hint = nearest(name, known, f"; the settings of this task: {', '.join(own)}" if own else "")
            raise Refused(f"unknown field --{name}{hint or '; this task has no settings of its own'}")
    with configuration.of_settings("Settings"):
        return {name: configuration.parse_value(name, known[name], text) for name, text in flags.items()}

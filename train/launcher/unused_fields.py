"""Refuses config fields that a request sets but that have no effect in its run.

Fields set by a task's DEFAULTS or by the forked run are accepted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from .. import config as configuration
from ..code.source import of_task
from ..config import Config, decays, strategies
from ..errors import Refused
from ..tasks import Task

_OPTIM, _GROUPS = ("optim.",), ("optim.no_decay", "optim.layer_decay")
_INSTEAD = {
    "updates": _OPTIM,
    "optimizer": _OPTIM,
    "param_groups": _GROUPS,
    # where a task's own schedule() begins and ends is for the fields to say
    "schedule": (
        "schedule.warmup",
        "schedule.decay",
        *(f"schedule.{one}" for one in decays.fields() if one != "total_epochs"),
    ),
}
"""Maps a task function to the prefixes of the config fields it replaces, unless the task reads them itself."""
_PLAIN = ("optim.name", "optim.lr", "optim.momentum", "optim.weight_decay")
"""Fields that a task's DEFAULTS may set although they have no effect."""
_NEEDS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "init_skip": ("init", ()),
    "optim.momentum": ("optim.name", ("sgd",)),
    "ema.warmup": ("ema.decay", ()),
    "checkpoint.keep_best": ("checkpoint.best", ()),
    "early_stopping.patience": ("early_stopping.metric", ()),
    "early_stopping.min_delta": ("early_stopping.metric", ()),
    **{f"schedule.{field}": ("schedule.decay", decays.with_field(field)) for field in decays.fields()},
    "schedule.base_batch_size": ("schedule.scaling", ("linear",)),
    **{
        f"parallel.{field}": ("parallel.strategy", strategies.with_field(field))
        for field in ("shard_size", "wrap", "find_unused_parameters")
    },
    "log.mfu": ("device", ("cuda",)),
}
"""Maps a field to the field that must be set for it to have any effect, and to the values that count; (): any."""
_OR = {"parallel.wrap": ("compile", "blocks")}
"""Maps a field to another field, and its value, with which it has an effect too."""
_OTHER_WAYS = {"optim.momentum": "other optimizers take --optim.args.betas '[0.9, 0.999]'"}
"""Maps a field to the end of the refusal, if there is a better way than the missing field."""
_EXCLUDED_BY = {"log.mfu": ("compile", "parallel.recompute")}
"""Maps a field to the fields that cancel its effect."""
_OF_SCRIPTS = "watch.healthy_minutes"
_OF_TASKS = ("data.root", "data.name")
"""Fields that only a task reads."""


Reader = Callable[[str], bool]
"""Returns whether a task reads a field."""


def asked(flags: Mapping[str, str], config_file: str | None = None, task: Task | None = None) -> dict[str, str]:
    """Map the fields that flags set, and those that a config file sets to other values than the defaults, to the text
    with which the user set them.

    Args:
        task: has the defaults.
    """
    fields = {name: f"--{name} {text}" for name, text in flags.items()}
    if config_file is not None:
        below = {name: info.default for name, info in configuration.fields().items()}
        if task is not None:
            own = dataclasses.fields(task.Settings) if task.Settings is not None else ()
            below |= {f"task.{one.name}": one.default for one in own} | task.DEFAULTS
        given = configuration.flatten(configuration.read_toml(Path(config_file)))
        for name, value in given.items():
            # a flag may turn off the feature for which the file sets fields
            is_whole = name in _NEEDS and not _lacks(name, below | given)
            if name not in fields and value != below.get(name) and not is_whole:
                fields[name] = f"{name} = {value} in {config_file}"
    return fields


def of_functions(functions: Iterable[str], reads: Reader, names: Iterable[str]) -> dict[str, str]:
    """Return those of these fields that a task's functions replace, with the function."""
    return {
        name: function
        for function in functions for name in names if name.startswith(_INSTEAD[function]) and not reads(name)
    }  # fmt: skip


def of_no_use(task: Task, config: Config, reads: Reader) -> list[str]:
    """Return the fields that have no effect in a run of this task: a function replaces them, or only a task could read
    them and this one does not."""
    own = [name for name in configuration.to_flat(config) if name.startswith("task.")]
    unread = [name for name in (*_OF_TASKS, *own) if not reads(name)]
    return sorted([*of_functions(functions_of(task), reads, configuration.fields()), *unread])


def functions_of(task: Task) -> list[str]:
    """Return the functions of a task that replace config fields."""
    return [function for function in _INSTEAD if getattr(task, function) is not None]


def check_functions(functions: Iterable[str], file: Path, reads: Reader, asked: Mapping[str, str]) -> None:
    """Check that a request sets no field that its task's functions replace.

    Raises:
        Refused: it does.
    """
    for name, function in of_functions(functions, reads, asked).items():
        raise Refused(
            f"{function}() in {file} replaces {asked[name]}; read config.{name} there, or leave out the field"
        )


def check_early(file: Path, flags: Mapping[str, str], config_file: str | None) -> None:
    """Do `check_functions` for a task that is not imported, as far as its source shows.

    Raises:
        Refused: as there, or its file cannot be read.
    """
    source = of_task(file, file.parent)
    own = source.defaults()  # a config file may repeat a default
    fields = {name: text for name, text in asked(flags, config_file).items() if name in flags or name not in own}
    check_functions(filter(source.binds, _INSTEAD), file, source.may_read, fields)


def check_read(task: Task, config: Config, reads: Reader, asked: Mapping[str, str]) -> None:
    """Check that every field that the request sets has an effect, given what the task's functions read.

    Raises:
        Refused: a field has none, or the task's DEFAULTS contradict its functions.
    """
    check_functions(functions_of(task), task.file, reads, asked)
    known, flat = configuration.fields(), configuration.to_flat(config)
    changed = [name for name in flat if name not in _PLAIN and name in known and flat[name] != known[name].default]
    for name, function in of_functions(functions_of(task), reads, changed).items():
        raise Refused(f"{function}() in {task.file} replaces --{name} {flat[name]}; leave out one of them")
    for name, text in asked.items():
        end = " of its Settings" if name.startswith("task.") else ""
        is_off = name in known and not flat[name]
        if (end or name in _OF_TASKS) and not is_off and not reads(name):
            raise Refused(f"{text} has no effect, because {task.file} does not read config.{name}{end}; leave it out")


def check(task: Task, config: Config, asked: Mapping[str, str]) -> None:
    """Check that every field that the request sets has an effect, given the other fields.

    Raises:
        Refused: a field has none.
    """
    known, flat = configuration.fields(), configuration.to_flat(config)
    for name, text in asked.items():
        is_off = name in known and not flat[name]
        if not is_off and (problem := _problem(name, task, flat)):
            raise Refused(f"{text} {problem}")


def _problem(name: str, task: Task, flat: dict[str, Any]) -> str:
    """Return why a field has no effect; '' if it has one."""
    is_of_task = (
        (name == "init_skip" and task.pretrained is not None)
        or (name.startswith((*_INSTEAD["schedule"], "schedule.total_epochs")) and task.schedule is not None)
        or (name.startswith(_OPTIM) and bool(task.optimizer or task.updates))
    )
    if not is_of_task and (which := _lacks(name, flat)):
        return f"has no effect without {which}; {_OTHER_WAYS.get(name, 'give both, or neither')}"
    for other in _EXCLUDED_BY.get(name, ()):
        if flat[other]:
            return f"has no effect with --{other}; leave out one of them"
    if name == _OF_SCRIPTS:
        return "has no effect on a task, only on --script; leave it out"
    return ""


def _lacks(name: str, flat: Mapping[str, Any]) -> str:
    """Return the flag that is missing for this field to have an effect; '' if none is."""
    other, values = _NEEDS.get(name, ("", ()))
    if not other or (flat[other] in values if values else flat[other]):
        return ""
    missing = f"--{other} {' or '.join(values)}".rstrip()
    if name in _OR:
        another, value = _OR[name]
        return "" if flat[another] == value else f"{missing} or --{another} {value}"
    return missing


def check_evaluation(task: Task, config: Config, eval_sets: Mapping[str, Any], asked: Mapping[str, str]) -> None:
    """Check that a request sets no field of evaluations if there is no evaluation set.

    Raises:
        Refused: it does.
    """
    flat = configuration.to_flat(config)
    for name, text in asked.items():
        if name.startswith("eval.") and flat[name] and not eval_sets:
            why = f"datasets() in {task.file} returns None for the evaluation set"
            raise Refused(f"{text} has no effect, because {why}; leave it out")

"""Combine layers of values into a checked configuration: defaults, task, file, flags. Later layers win."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pydantic
import pydantic_core
from pydantic import TypeAdapter

from ..errors import Refused, nearest, one_line, shortened
from .fields import (
    fields,
    flatten,
    is_argument,
    is_optional,
    of_settings,
    parse_value,
    read_toml,
    reason_of,
    spread,
    to_flat,
    to_toml,
)
from .schema import Argument, Config

_REPLACE = (("steps", "epochs"), ("eval.every_steps", "eval.every_epochs"))
"""Pairs of fields of which only one may be given."""


def resolve(
    flags: Mapping[str, str], *, config_file: str | None, settings: type | None, defaults: Mapping[str, Any],
    task_file: Path,
) -> Config:  # fmt: skip
    """Combine four layers: defaults of the fields, DEFAULTS of the task, --config FILE, flags.

    Args:
        settings: the Settings of the task.
        defaults: the DEFAULTS of the task, by dotted name.

    Raises:
        Refused: a name is unknown, or a value is wrong.
    """
    _settings_types(settings, task_file)  # refuse annotations that are no types before values
    flat: dict[str, Any] = {"epochs": fields()["epochs"].default}
    source = f"DEFAULTS in {task_file}: "
    flat = layer(dict(defaults), settings, source, flat)
    build(flat, settings, source=f"{task_file}: ", partial=True)
    if config_file is not None:
        source = f"{config_file}: "
        # check the file alone first, so that a message names the file and not the flags
        given = flatten(read_toml(Path(config_file)), source)
        flat = layer(given, settings, source, flat)
        build(flat, settings, source=source, partial=True)
    config = with_flags(flags, settings=settings, task_file=task_file, flat=flat)
    if config.data.seed is None:  # a fork with another seed keeps this one
        config.data.seed = config.seed
    check_lasts(config, settings)
    return config


def with_flags(flags: Mapping[str, str], *, settings: type | None, task_file: Path, flat: dict[str, Any]) -> Config:
    """Lay flags over these fields.

    Raises:
        Refused: a flag names no field, or its value is wrong.
    """
    own = {f"task.{name}": hint for name, hint in _settings_types(settings, task_file).items()}
    known = _types(flags) | own
    for name in flags:
        if name not in known:
            hint = nearest(name, known, otherwise=f"; the settings of this task: {', '.join(own)}" if own else "")
            raise Refused(f"unknown field --{name}{hint or '; this task has no Settings'}")
    with of_settings("Settings"):
        values = {name: parse_value(name, known[name], text) for name, text in flags.items()}
    config = build(layer(values, settings, "", flat), settings)
    if config.data.root:
        config.data.root = str(Path(config.data.root).absolute())
    return config


def _types(flags: Mapping[str, str]) -> dict[str, Any]:
    """Map all fields, and the optimizer arguments among the flags, to their types."""
    found = {name: info.annotation for name, info in fields().items()}
    return found | {name: Argument for name in flags if is_argument(name)}


def _settings_types(settings: type | None, task_file: Path) -> dict[str, Any]:
    if settings is None:
        return {}
    with of_settings(f"Settings in {task_file}"):
        hints = typing.get_type_hints(settings, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(settings)}


def layer(flat: dict[str, Any], settings: type | None, source: str, below: dict[str, Any]) -> dict[str, Any]:
    """Lay the fields of `flat` (dotted names) over those of `below`. Fields of a pair in _REPLACE replace each other.

    Args:
        settings: the Settings of the task, whose fields are task.NAME.
        source: where the values come from, as the beginning of a message.

    Raises:
        Refused: a name is unknown, or both fields of a pair are in this layer.
    """
    own = {f"task.{field.name}" for field in dataclasses.fields(settings)} if settings else set()
    flat, known = spread(flat), set(fields()) | own
    for name in filter(lambda name: not is_argument(name), flat):
        if name not in known:
            raise Refused(f"{source}unknown field {name}{nearest(name, known, otherwise='; see: train run --help')}")
    merged = dict(below)
    for pair in _REPLACE:
        given = [name for name in pair if flat.get(name) is not None]
        if len(given) == 2:
            raise Refused(f"{source}{' and '.join(pair)} replace each other; give one of them")
        if given:
            merged |= dict.fromkeys(pair)
    return merged | flat


def check_flags(flags: Mapping[str, str]) -> dict[str, Any]:
    """Parse fields given as flags, as far as possible before the task is known.

    Raises:
        Refused: a value does not fit its field, or two fields exclude each other.
    """
    known = _types(flags)
    values = {name: parse_value(name, known[name], text) for name, text in flags.items() if name in known}
    layer(values, None, "", {})
    return values


def build(flat: dict[str, Any], settings: type | None = None, *, source: str = "", partial: bool = False) -> Config:
    """Build the configuration from these values (dotted names) and check each of them. Types are strict.

    Args:
        partial: whether Settings without a default may be missing; `task` is None then.

    Raises:
        Refused: a value has the wrong type or is out of range.
    """
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *groups, last = name.split(".")
        inner = tree
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[last] = value
    task = tree.pop("task", {})
    config = _checked(Config, tree, source)
    _check_mirror(config.checkpoint.mirror, source)
    if config.epochs is None and config.steps is None:
        raise Refused(f"{source}neither epochs nor steps is set; give one of them")
    if config.steps is not None:
        config.epochs = None
    if config.eval.every_steps is not None:
        config.eval.every_epochs = None
    elif config.eval.every_epochs is None:
        config.eval.every_epochs = fields()["eval.every_epochs"].default
    if settings:
        with of_settings(f"{source}Settings"):
            config.task = _checked(settings, _defaults(settings) | task, source, "task.", partial)
    return config


def _check_mirror(url: str, source: str) -> None:
    """Refuse a URL with a password, which would be kept in the run folder, and one that other runs may share."""
    field = f"{source}checkpoint.mirror"
    if re.search(r"//[^/@]*:[^/]*@|[?#]", url):
        way = (
            "leave it out; the libraries read credentials from their own files and variables (~/.aws, ~/.ssh, HF_TOKEN)"
        )
        raise Refused(f"{field}: the URL holds a password or a query, and would be kept with the run; {way}")
    if "::" in url:
        raise Refused(f"{field} = {url!r}: chains of protocols are not supported; give one protocol://")
    if url and "://" not in url and not url.startswith("/"):
        raise Refused(f"{field} = {url!r}: give a URL such as s3://BUCKET/NAME, or the absolute path of a folder")


def _defaults(settings: type) -> dict[str, Any]:
    """Return the defaults of a task's Settings, to check them against their types."""
    missing = dataclasses.MISSING
    values: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = field.default_factory() if field.default_factory is not missing else field.default
        if field.init and value is not missing:
            values[field.name] = pydantic_core.to_jsonable_python(value, fallback=str)
    return values


def _checked(owner: Any, tree: dict[str, Any], source: str, prefix: str = "", partial: bool = False) -> Any:
    for name, value in tree.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise Refused(f"{source}{prefix}{name} = {value}: should be a finite number")
    try:
        # through JSON, whose strict mode suits TOML: tables become dataclasses and 3 may be a float, but "3" is no
        # number and 1 is not true
        text = json.dumps(tree, default=lambda value: f"{value} (a {type(value).__name__})")
        return TypeAdapter(owner).validate_json(text, strict=True)
    except pydantic.ValidationError as error:
        errors = [each for each in error.errors() if not (partial and each["type"] == "missing")]
        if not errors:
            return None
        first = errors[0]
        parts = [str(part) for part in first["loc"] if isinstance(part, int) or str(part).isidentifier()]
        # pydantic adds the name of a union's member to the location of an error
        depth = 3 if is_argument(".".join(parts[:3])) else 2
        name = ".".join(parts[: depth if parts and parts[0] in tree and isinstance(tree[parts[0]], dict) else 1])
        if first["type"] == "missing":
            raise Refused(f"{source}{prefix}{name} has no default; set it with --{prefix}{name}") from None
        known = fields().get(prefix + name)
        reason = reason_of(error, known.annotation if known else None)
        raise Refused(f"{source}{prefix}{name} = {first['input']!r}: {reason}") from None
    except pydantic.errors.PydanticSchemaGenerationError as error:
        problem = f"{source}Settings has a field whose type a flag cannot express"
        raise Refused(f"{problem}: {one_line(error)[:200]}") from None


def from_toml(path: Path, settings: type | None) -> Config:
    """Read the config.toml of a run folder. A field that is missing there was None, except settings of the task that
    have another default.

    Raises:
        Refused: the file was edited and is invalid.
    """
    return _from_tree(read_toml(path), settings, f"{path}: ")


def _from_tree(tree: dict[str, Any], settings: type | None, source: str) -> Config:
    blank = _blank()
    for field in dataclasses.fields(settings) if settings else ():
        if field.default is None:
            blank[f"task.{field.name}"] = None
    flat = layer(flatten(tree, source), settings, source, blank)
    return build(flat, settings, source=source)


def _blank() -> dict[str, Any]:
    return {name: None for name, info in fields().items() if is_optional(info.annotation)}


def read_flat(path: Path) -> dict[str, Any]:
    """Read the fields in the config.toml of a run folder, unchecked: they may be of another version of the task.

    Raises:
        Refused: the file was edited and is no configuration.
    """
    return _blank() | flatten(read_toml(path), f"{path}: ")


def check_lasts(config: Config, settings: type | None) -> None:
    """Refuse Settings that ranks would read differently from the config.toml of the run folder.

    Raises:
        Refused: Settings change their own values, or hold values that TOML cannot.
    """
    with of_settings("Settings that cannot be kept in config.toml"):
        again = _from_tree(tomllib.loads(to_toml(config)), settings, "Settings do not take what they gave: ")
        before, after = to_flat(config), to_flat(again)
        for name in sorted(before.keys() | after.keys()):
            then, now = before.get(name), after.get(name)
            own = name.removeprefix("task.")
            # a set has no order
            is_same = own != name and getattr(config.task, own, None) == getattr(again.task, own, None)
            if then != now and not is_same:
                was, is_now = shortened(repr(then), 80), shortened(repr(now), 80)
                raise Refused(
                    f"{name} is {was}, but ranks would read {is_now} from config.toml: __post_init__ must change "
                    "nothing when called again, and a table or list must not contain none"
                )


def forbidden_changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the dotted names of fields that differ and that a resume may not change. A field that is missing in
    `before` has its default: new fields do not change the format of run folders."""
    known = fields()
    defaults = {name: info.default for name, info in known.items()}
    names = [name for name in sorted(before.keys() | after.keys()) if not (name in known and known[name].may_change)]
    return [name for name in names if before.get(name, defaults.get(name)) != after.get(name)]


def check_changes(before: dict[str, Any], after: dict[str, Any], *, what: str, way: str = "put it back") -> None:
    """Check that no field differs that a resume may not change. Raises Refused: its message begins with `what` and
    ends with `way`."""
    for name in forbidden_changes(before, after):
        was, now = before.get(name), after.get(name)
        raise Refused(f"{what}: {name} was {was} and is {now} now, which a resume may not change; {way}")

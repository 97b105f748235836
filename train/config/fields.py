"""The config fields: their names, types and help, and their text in flags and TOML."""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import functools
import inspect
import itertools
import json
import tomllib
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import pydantic_core
from pydantic import ConfigDict, TypeAdapter

from ..errors import Refused, described, nearest, one_line
from . import schema
from .schema import ON_RESUME, Config

NONE = "none"
"""Key of a TOML file that lists the fields whose value is none."""
_TABLE = "optim.args"
"""A field that is a table. Each of its names is a field `optim.args.NAME`."""


@dataclasses.dataclass(frozen=True)
class FieldInfo:
    """A config field: its dotted name, type and default."""

    name: str
    annotation: Any
    default: Any
    owner: str
    """Name of the class that declares the field."""
    may_change: bool
    """Whether a resume may change it."""

    @property
    def help(self) -> str:
        """The docstring of the field."""
        return _texts().get((self.owner, self.name.rpartition(".")[2]), "")


@functools.cache
def _texts() -> dict[tuple[str, str], str]:
    """Map (class, field) to the docstring. Read only for help; pydantic would read it in every process of a run."""
    found = {}
    classes = [node for node in ast.parse(inspect.getsource(schema)).body if isinstance(node, ast.ClassDef)]
    for owner in classes:
        for field, text in itertools.pairwise(owner.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(said))):
                    found[owner.name, name] = inspect.cleandoc(said)
    return found


@functools.cache
def fields() -> dict[str, FieldInfo]:
    """Map the dotted name of every field of Config to its description, without the settings of the task."""
    return {info.name: info for info in _walk(Config, "")}


def _walk(owner: Any, prefix: str) -> typing.Iterator[FieldInfo]:
    hints = typing.get_type_hints(owner, include_extras=True)
    for name, field in owner.__pydantic_fields__.items():
        if prefix == "" and name == "task":
            continue
        if dataclasses.is_dataclass(hints[name]):
            yield from _walk(hints[name], f"{prefix}{name}.")
        else:
            marks = getattr(hints[name], "__metadata__", ())
            default = None if prefix + name == _TABLE else field.default
            yield FieldInfo(prefix + name, hints[name], default, owner.__name__, ON_RESUME in marks)


def is_argument(name: str) -> bool:
    """Whether a dotted name is an argument of the optimizer, which only torch knows."""
    return name.rpartition(".")[0] == _TABLE


def spread(flat: dict[str, Any]) -> dict[str, Any]:
    """Turn {"optim.args": {"eps": 1}} into {"optim.args.eps": 1}."""
    table = flat.get(_TABLE)
    if not isinstance(table, dict):
        return flat
    rest = {name: value for name, value in flat.items() if name != _TABLE}
    return rest | {f"{_TABLE}.{name}": value for name, value in table.items()}


def _members(annotation: Any) -> list[Any]:
    """Return the types in a union, without annotations: [int, NoneType] for Count | None."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _members(arguments[0])
    if origin in (types.UnionType, typing.Union):
        return [member for argument in arguments for member in _members(argument)]
    return [annotation]


def _is_literal(member: Any) -> bool:
    return typing.get_origin(member) is Literal


def _words(members: list[Any]) -> list[str]:
    """Return the words that literal types allow."""
    return [str(word) for member in filter(_is_literal, members) for word in typing.get_args(member)]


def is_optional(annotation: Any) -> bool:
    """Whether a type allows None."""
    return type(None) in _members(annotation)


def type_name(annotation: Any) -> str:
    """Return the type as help shows it: `N`, `X`, `true|false`, `sgd|adam`."""
    names: list[str] = []
    for member in _members(annotation):
        if _is_literal(member):
            names += _words([member])
        else:
            plain = typing.get_origin(member) or member
            words = {dict: "TABLE", bool: "true|false", int: "N", float: "X", type(None): "none"}
            names.append(words.get(plain, "TEXT"))
    return "|".join(names)


@contextlib.contextmanager
def of_settings(what: str) -> Iterator[None]:
    """Context manager that turns any error in the code of a task's Settings into a Refused that begins with `what`."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        raise Refused(f"{what}: {one_line(described(error))[:300]}") from error


def parse_value(name: str, annotation: Any, text: str) -> Any:
    """Parse the text of a flag.

    Raises:
        Refused: the text does not fit the type of the field, or is out of range.
    """
    try:
        text.encode()
    except UnicodeEncodeError:  # Python reads invalid bytes as surrogates, which TOML cannot hold
        raise Refused(f"--{name} {text}: must be UTF-8 text") from None
    members = _members(annotation)
    if type(None) in members and text.lower() == "none":
        return None
    if bool in members and all(member in (bool, type(None)) or _is_literal(member) for member in members):
        words = ["true", "false", *_words(members)]
        if text not in words:
            raise Refused(f"--{name} {text}: must be {', '.join(words[:-1])} or {words[-1]}")
        return text == "true" if text in words[:2] else text
    value: Any = text
    if any((typing.get_origin(member) or member) in (list, tuple, dict) for member in members):
        try:
            value = tomllib.loads(f"v = {text}")["v"]
        except (ValueError, RecursionError):  # ValueError also for a number with thousands of digits
            raise Refused(f"--{name} {text}: must be written as in TOML, for example [1, 2]") from None
    try:
        adapter = TypeAdapter(annotation, config=ConfigDict(allow_inf_nan=False))
        return adapter.validate_python(value)
    except pydantic.ValidationError as error:
        raise Refused(f"--{name} {text}: {reason_of(error, annotation)}") from None


def reason_of(error: pydantic.ValidationError, annotation: Any = None) -> str:
    """Return the first error as text."""
    first = error.errors()[0]
    message = first["msg"][0].lower() + first["msg"][1:]
    words = _words(_members(annotation))
    if first["type"] == "literal_error":
        message += nearest(str(first["input"]), words)
    elif first["type"] != schema.NO_TASK:  # words that a union allows besides numbers
        message += "".join(f", or {word}" for word in words)
    return one_line(message.replace("input should", "should"))


def read_toml(path: Path) -> dict[str, Any]:
    """Read a configuration file.

    Raises:
        Refused: the file cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors write a byte order mark
    except OSError as error:
        raise Refused(f"cannot read the configuration file {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # also for invalid UTF-8 and numbers with thousands of digits
        raise Refused(f"{path} is not valid TOML: {one_line(error)}") from None


def flatten(tree: dict[str, Any], source: str = "") -> dict[str, Any]:
    """Turn {"optim": {"lr": 1}} into {"optim.lr": 1}. Flattens only the groups of Config.

    Raises:
        Refused: a group has a plain value.
    """
    flat: dict[str, Any] = {}
    groups = {name.split(".")[0] for name in fields() if "." in name} | {"task"}
    for key, value in tree.items():
        if key == NONE:
            if not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
                raise Refused(f'{source}{NONE} must be a list of field names, such as {NONE} = ["task.size"]')
            flat.update(dict.fromkeys(value))
        elif key not in groups:
            flat[key] = value
        elif isinstance(value, dict):
            flat |= spread({f"{key}.{inner}": leaf for inner, leaf in value.items()})
        else:
            raise Refused(f"{source}{key} is a group of fields, not a value; write its fields below [{key}]")
    return flat


def to_flat(config: Config) -> dict[str, Any]:
    """Map every dotted field name to its value as in JSON. Settings of the task are task.NAME."""
    tree = dataclasses.asdict(config)
    tree["task"] = tree["task"] or {}
    return dict(json.loads(json.dumps(flatten(pydantic_core.to_jsonable_python(tree)))))


def to_toml(config: Config) -> str:
    """Return the configuration as TOML. TOML has no null, so fields that are None are left out.

    Settings of the task that are None but have another default are listed under the key `none`.
    """
    import tomli_w

    tree = copy.deepcopy(dataclasses.asdict(config))
    tree["task"] = tree["task"] or {}
    settings = dataclasses.fields(config.task) if config.task is not None else ()
    none = [f"task.{own.name}" for own in settings if tree["task"][own.name] is None and own.default is not None]
    if none:
        tree = {NONE: none} | tree

    def without_none(value: Any) -> Any:
        return {k: without_none(v) for k, v in value.items() if v is not None} if isinstance(value, dict) else value

    return tomli_w.dumps(without_none(pydantic_core.to_jsonable_python(tree)))

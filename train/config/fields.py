"""Fields of the configuration and their text: in flags, in TOML, in help."""

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

from train.config import schema
from train.config.schema import ON_RESUME, Config
from train.errors import Refused, nearest, one_line

NONE = "none"
"""The key of a TOML file that lists the fields that are none."""
_TABLE = "optim.args"
"""The field that is a table of any names, each of which is a field `optim.args.NAME`."""


@dataclasses.dataclass(frozen=True)
class FieldInfo:
    """One field as a flag: its dotted name, type and default."""

    name: str
    annotation: Any
    default: Any
    owner: str
    """The name of its class."""
    may_change: bool
    """Whether a resume may change it."""

    @property
    def help(self) -> str:
        """The text below it."""
        return _texts().get((self.owner, self.name.rpartition(".")[2]), "")


@functools.cache
def _texts() -> dict[tuple[str, str], str]:
    """The text below each field of each class, read only for help: pydantic would read it in every process of a run."""
    found = {}
    classes = [one for one in ast.parse(inspect.getsource(schema)).body if isinstance(one, ast.ClassDef)]
    for owner in classes:
        for field, text in itertools.pairwise(owner.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(said))):
                    found[owner.name, name] = inspect.cleandoc(said)
    return found


@functools.cache
def fields() -> dict[str, FieldInfo]:
    """Every field of Config by its dotted name, in the order of the dataclasses; the task's own are not among them."""
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
    """Whether a dotted name is one of the optimizer's arguments, which only torch knows."""
    return name.rpartition(".")[0] == _TABLE


def spread(flat: dict[str, Any]) -> dict[str, Any]:
    """{"optim.args": {"eps": 1}} as {"optim.args.eps": 1}."""
    table = flat.get(_TABLE)
    if not isinstance(table, dict):
        return flat
    rest = {name: value for name, value in flat.items() if name != _TABLE}
    return rest | {f"{_TABLE}.{name}": value for name, value in table.items()}


def _members(annotation: Any) -> list[Any]:
    """The types that a type is made of, without marks: [int, NoneType] for Count | None."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _members(arguments[0])
    if origin in (types.UnionType, typing.Union):
        return [member for argument in arguments for member in _members(argument)]
    return [annotation]


def is_optional(annotation: Any) -> bool:
    """Whether None is among the values of this type."""
    return type(None) in _members(annotation)


def type_name(annotation: Any) -> str:
    """The type as help shows it: `N`, `X`, `true|false`, `sgd|adam`."""
    names: list[str] = []
    for member in _members(annotation):
        if typing.get_origin(member) is Literal:
            names += map(str, typing.get_args(member))
        else:
            plain = typing.get_origin(member) or member
            words = {dict: "TABLE", bool: "true|false", int: "N", float: "X", type(None): "none"}
            names.append(words.get(plain, "TEXT"))
    return "|".join(names)


@contextlib.contextmanager
def of_settings(what: str) -> Iterator[None]:
    """Turn whatever the code of a task's Settings raises into a Refused that begins with `what`."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        raise Refused(f"{what}: {one_line(f'{type(error).__name__}: {error}')[:300]}") from error


def parse_value(name: str, annotation: Any, text: str) -> Any:
    """The value that a flag's text stands for.

    Raises:
        Refused: the text is not of the field's type or out of its range.
    """
    try:
        text.encode()
    except UnicodeEncodeError:  # Python takes other bytes for halves of letters, which no TOML holds
        raise Refused(f"--{name} {text}: is no UTF-8 text") from None
    members = _members(annotation)
    if type(None) in members and text.lower() == "none":
        return None
    if bool in members and {bool, type(None)}.issuperset(members):
        if text not in ("true", "false"):
            raise Refused(f"--{name} {text}: must be true or false")
        return text == "true"
    value: Any = text
    if any((typing.get_origin(member) or member) in (list, tuple, dict) for member in members):
        try:
            value = tomllib.loads(f"v = {text}")["v"]
        except (ValueError, RecursionError):  # Python's own, of a number with thousands of digits
            raise Refused(f"--{name} {text}: must be written as in TOML, for example [1, 2]") from None
    try:
        adapter = TypeAdapter(annotation, config=ConfigDict(allow_inf_nan=False))
        return adapter.validate_python(value)
    except pydantic.ValidationError as error:
        raise Refused(f"--{name} {text}: {reason_of(error, annotation)}") from None


def reason_of(error: pydantic.ValidationError, annotation: Any = None) -> str:
    """The first thing that is wrong, as text."""
    first = error.errors()[0]
    message = first["msg"][0].lower() + first["msg"][1:]
    literals = [member for member in _members(annotation) if typing.get_origin(member) is Literal]
    words = [str(word) for one in literals for word in typing.get_args(one)]
    if first["type"] == "literal_error":
        message += nearest(str(first["input"]), words)
    else:  # the words that a union takes beside numbers
        message += "".join(f", or {word}" for word in words)
    return one_line(message.replace("input should", "should"))


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a configuration file.

    Raises:
        Refused: it cannot be read or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors put a mark before the text
    except OSError as error:
        raise Refused(f"cannot read the configuration file {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # UTF-8 that is none, too, and numbers with thousands of digits
        raise Refused(f"{path} is not valid TOML: {one_line(error)}") from None


def flatten(tree: dict[str, Any], source: str = "") -> dict[str, Any]:
    """{"optim": {"lr": 1}} as {"optim.lr": 1}; groups only as deep as Config goes.

    Raises:
        Refused: a group was given a plain value.
    """
    flat: dict[str, Any] = {}
    groups = {name.split(".")[0] for name in fields() if "." in name} | {"task"}
    for key, value in tree.items():
        if key == NONE:
            if not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
                raise Refused(f'{source}{NONE} lists the fields that are none, by their names: ["task.size"]')
            flat.update(dict.fromkeys(value))
        elif key not in groups:
            flat[key] = value
        elif isinstance(value, dict):
            flat |= spread({f"{key}.{inner}": leaf for inner, leaf in value.items()})
        else:
            raise Refused(f"{source}{key} is a group of fields, not a value; write a table [{key}]")
    return flat


def to_flat(config: Config) -> dict[str, Any]:
    """Every field by its dotted name, the task's settings as task.NAME; values as JSON has them."""
    tree = dataclasses.asdict(config)
    tree["task"] = tree["task"] or {}
    return dict(json.loads(json.dumps(flatten(pydantic_core.to_jsonable_python(tree)))))


def to_toml(config: Config) -> str:
    """The configuration as TOML. TOML knows no null: fields that are None are left out.

    Of a task's settings those are listed by name whose default is another: else it would be taken for their value.
    """
    import tomli_w

    tree = copy.deepcopy(dataclasses.asdict(config))
    tree["task"] = tree["task"] or {}
    own = dataclasses.fields(config.task) if config.task is not None else ()
    none = [f"task.{one.name}" for one in own if tree["task"][one.name] is None and one.default is not None]
    if none:
        tree = {NONE: none} | tree

    def without_none(value: Any) -> Any:
        return {k: without_none(v) for k, v in value.items() if v is not None} if isinstance(value, dict) else value

    return tomli_w.dumps(without_none(pydantic_core.to_jsonable_python(tree)))

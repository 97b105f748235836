"""Reads the keyword arguments of a call from Python as the options of a command.

options_of("launch", ["digits"], {"nproc": 2, "optim": {"lr": 0.1}})   # train launch digits --nproc 2 --optim.lr 0.1
"""

from __future__ import annotations

import json
import shlex
import types
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import Refused, nearest
from . import parser

_OF_COMMAND_LINE = ("follow", "help")
"""Flags of commands that Python has other ways for."""


def task_word(task: str | Path | types.ModuleType) -> str:
    """Return the word of a command line for a task."""
    if not isinstance(task, types.ModuleType):
        return str(task) if str(task)[:1] != "-" else f"./{task}"
    from .. import tasks

    file = getattr(task, "__file__", None)
    if not file:
        raise Refused(f"the module {task.__name__} has no file; write the task into a Python file, and give its path")
    path = Path(file).absolute()
    return path.stem if path == Path(tasks.__file__).parent / f"{path.stem}.py" else str(path)


def of_program(
    command: str, task: str | Path | types.ModuleType | None, options: dict[str, Any], *,
    arguments: str | Sequence[object],
) -> Namespace:  # fmt: skip
    """Return the options of a command about a task or a script; as in `launch`."""
    if task is None and not isinstance(options.get("task", {}), Mapping):
        task = options.pop("task")
    has_fields = options["script"] is None and options.get("module") is None
    return options_of(
        command, [] if task is None else [task_word(task)], options, arguments=arguments, has_fields=has_fields
    )


def options_of(
    command: str, words: list[str], options: Mapping[str, Any], *, arguments: str | Sequence[object] = (),
    has_fields: bool = True,
) -> Namespace:  # fmt: skip
    """Return the options of a command, as it parses them from its command line.

    Args:
        arguments: What follows after --.
        has_fields: Whether flags may be config fields. A script has its own arguments instead.

    Raises:
        Refused: as the command line refuses it.
    """
    made = parser.parser_of(command)
    for name, value in _flat(options):
        if name in _OF_COMMAND_LINE:
            raise Refused(f"{name} is for the command line; in Python: run.wait()")
        if not has_fields:
            _check_of_script(made, name, value)
        words = [*words, *_flag(made, name, value)]
    rest = _split(arguments) if isinstance(arguments, str) else [*map(str, arguments)]
    return parser.parse(made, [*words, *(["--", *rest] if rest else [])])


def _check_of_script(made: parser.Parser, name: str, value: Any) -> None:
    """Refuse a name that is neither an option of the command nor a limit of `watch`: it is the script's own."""
    known = {one: action for one, action in made.flags.items() if not isinstance(action, parser.Field)}
    if name not in known and not name.startswith("watch."):
        given = f"arguments=['--{name}', {value!r}]"
        raise Refused(f"unknown flag {name}{nearest(name, known)}; the script's own arguments are given so: {given}")


def _split(text: str) -> list[str]:
    """Return the words of a text, as a shell splits it."""
    try:
        return shlex.split(text)
    except ValueError:
        raise Refused(f"arguments={text!r}: a quote is not closed; close it, or give a list of words") from None


def values_of(parameters: Mapping[str, Any] | None) -> list[str]:
    """Return parameters with their values as the command line takes them: NAME=A,B."""
    found = []
    for name, given in (parameters or {}).items():
        if isinstance(given, str):
            found.append(f"{name}={given}")
            continue
        plain = given.tolist() if hasattr(given, "tolist") else given  # of numpy
        values = plain if isinstance(plain, Sequence) else [plain]
        texts = [one if isinstance(one, str) else "none" if one is None else _toml(one) for one in values]
        if with_comma := next((one for one in values if isinstance(one, str) and "," in one), None):
            raise Refused(f"{name}: {with_comma!r} has a comma; a sweep takes words and numbers, or lists of them")
        found.append(f"{name}={','.join(texts)}")
    return found


def _flat(options: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return options by dotted names: optim={"lr": 0.1} is optim.lr."""
    from .. import config

    groups = {name[: name.rindex(".") + 1] for name in config.fields() if "." in name} | {"task.", "optim.args."}
    found = []
    for name, value in options.items():
        whole = f"{prefix}{name}"
        if isinstance(value, Mapping) and f"{whole}." in groups:
            found += _flat(value, f"{whole}.")
        else:
            found.append((whole, value))
    return found


def _flag(made: parser.Parser, name: str, value: Any) -> list[str]:
    """Return a flag and its value as words of a command line; [] if it is not given."""
    action = made.flag(name)  # refuses a name that does not exist
    flag, is_field = f"--{name}", action.dest == name.replace("-", "_") and isinstance(action, parser.Field)
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise Refused(f"{flag} {value}: give True or False")
        return [flag] if value else []
    if value is None:
        return [f"{flag}=none"] if is_field else []
    if isinstance(value, (list, tuple, Mapping)) and is_field:
        return [f"{flag}={_toml(value)}"]
    if isinstance(value, (list, tuple)) and name == "gpus":
        return [f"{flag}={','.join(map(str, value))}" + "," * (len(value) == 1)]
    if isinstance(value, types.ModuleType):
        value = task_word(value)
    if isinstance(value, (list, tuple)) and name == "rungs":
        return [f"{flag}={','.join(map(str, value))}"]
    if name == "after":
        runs = value if isinstance(value, (list, tuple)) else [value]
        return [f"{flag}={','.join(one if isinstance(one, str) else one.name for one in runs)}"]
    values = value if isinstance(value, (list, tuple)) else [value]
    return [f"{flag}={_toml(one) if isinstance(one, bool) else one}" for one in values]


def _toml(value: Any) -> str:
    """Return a value as TOML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(str(name))} = {_toml(one)}" for name, one in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)

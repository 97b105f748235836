"""Arguments of commands: argparse, and what this command line has beyond it.

A flag is a field of Config (`--optim.lr 0.1`) or a command's own. Either is written with - or _, takes its value after
a blank or =, stands anywhere, is never abbreviated, and the last one wins.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
from argparse import SUPPRESS, Action, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from train.commands import COMMANDS
from train.commands.completion_values import words
from train.errors import Refused, is_whole, nearest, one_line, whole

if TYPE_CHECKING:
    from train.commands.completion_values import Offer

_FIRST = {
    "name", "config", "nproc", "gpus", "follow", "spawn", "all", "on", "nodes", "gpus-per-node", "time", "epochs",
    "steps", "batch_size", "optim.lr",
}  # fmt: skip
"""What help shows first where fields are flags too, and flags are many."""


_ALIASES = {"log.trace": "--trace", "init.file": "--init"}
"""Shorter flags of fields."""


class Parser(argparse.ArgumentParser):
    """The parser of one command, which knows its flags by name."""

    def __init__(self, **kwargs: Any) -> None:
        self.flags: dict[str, Action] = {}
        """Every flag by its name, written with _ and without dashes."""
        self.short: dict[str, Action] = {}
        """Those of one letter, as `-n`."""
        self.takes_fields = False
        """Whether the fields of Config are flags of this command. To be set before its arguments."""
        self.rest: str | None = None
        """The option with which arguments after -- are taken, as `options.arguments`."""
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)
        self._more = self.add_argument_group("more options")

    def add_argument(self, *names: str, offer: Offer | None = None, **kwargs: Any) -> Action:
        """As argparse has it. `offer`: what a shell offers for its value."""
        is_first = not (self.takes_fields and names[0].startswith("-")) or names[-1].lstrip("-") in _FIRST
        add = super().add_argument if is_first else self._more.add_argument
        return self._known(add(*names, **kwargs), offer)

    def _known(self, action: Action, offer: Offer | None) -> Action:
        for option in action.option_strings:
            if option.startswith("--"):
                self.flags[option[2:].replace("-", "_")] = action
            else:
                self.short[option] = action
        if offer is not None:
            action.completer = offer  # type: ignore[attr-defined] # where argcomplete looks for it
        return action

    def add_fields(self) -> None:
        """Take every field of Config as a flag, into `options.flags`, as text. After all other arguments."""
        from train import config

        self.usage = self.format_usage().removeprefix("usage: ").rstrip() + " [--FIELD VALUE ...]"
        title = "fields (flags here, keys of a --config file; task settings are --task.NAME)"
        groups = {"": self.add_argument_group(title)}
        for info in config.fields().values():
            kind = config.type_name(info.annotation)
            default = "" if info.default in (None, "") else f" [{str(info.default).lower()}]"
            choices = [word for word in kind.split("|") if not word.isupper()]
            name, of = info.name, info.name.rpartition(".")[0]
            if of not in groups:
                groups[of] = self.add_argument_group(f"fields of {of}")
            add = super().add_argument if name in _FIRST else groups[of].add_argument
            names = [f"--{name}", *([_ALIASES[name]] if name in _ALIASES else [])]
            action = add(*names, action=_Field, metavar=kind + default, help=one_line(info.help).replace("%", "%%"))
            self._known(action, words(*choices) if choices else None)

    def flag(self, name: str) -> Action:
        """The flag of this name, given without the dashes before it.

        Raises:
            Refused: there is none.
        """
        plain = name.replace("-", "_")
        if plain not in self.flags and self.takes_fields and plain.startswith(("task.", "optim.args.")):
            self.add_argument(f"--{plain}", action=_Field, help="which only the task, or torch, knows")
        if plain not in self.flags:
            known = [action.option_strings[-1][2:] for action in self.flags.values()]
            raise Refused(f"unknown flag --{plain}{nearest(plain, known, f'; see: {self.prog} --help', '--')}")
        return self.flags[plain]

    def error(self, message: str) -> NoReturn:
        """Refuse what argparse finds wrong."""
        raise Refused(f"{one_line(message)}; see: {self.prog} --help")


class _Field(Action):
    """Collects a field's text in `flags`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs | {"dest": kwargs["option_strings"][0][2:], "default": SUPPRESS})

    def __call__(self, parser: Any, namespace: Namespace, values: Any, option_string: str | None = None) -> None:
        namespace.flags = {**namespace.flags, self.dest: values}


def parser_of(command: str) -> Parser:
    """The parser of a command, as its module fills it."""
    summary = COMMANDS[command]
    parser = Parser(prog=f"train {command}", description=f"{summary[0].upper()}{summary[1:]}.")
    importlib.import_module(f"train.commands.{command}").add_arguments(parser)
    parser.add_argument("--runs", metavar="DIR", help="where run folders live; default: $TRAIN_RUNS, else ./runs")
    if parser.takes_fields:
        parser.add_fields()
    return parser


def parse(parser: Parser, arguments: list[str]) -> Namespace:
    """A command's options; among them `runs`, and `flags`: the fields that were given, as text.

    Raises:
        Refused: something is unknown, lacks its value, or stands where it cannot.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(_in_order(parser, arguments[:end]), Namespace(flags={}))
    if parser.rest is not None and getattr(options, parser.rest) is not None:
        options.arguments = arguments[end + 1 :]
    elif arguments[end:]:
        raise Refused(f"what is -- for? only launch --script takes arguments after it; see: {parser.prog} --help")
    return options


def runs_folder(given: str | None) -> Path:
    """Where run folders live: --runs, else $TRAIN_RUNS, else ./runs.

    Raises:
        Refused: --runs was given as an empty text, or something else than a folder is there.
    """
    if given == "":
        raise Refused("--runs is empty; give a folder, or leave it out for ./runs")
    folder = Path(given or os.environ.get("TRAIN_RUNS") or "runs").absolute()
    if os.path.lexists(folder) and not folder.is_dir():
        raise Refused(f"{folder} is not a folder, so there are no runs in it; choose another with --runs")
    return folder


def _in_order(parser: Parser, arguments: list[str]) -> list[str]:
    """The arguments as argparse cannot misread them: first flags, each with its value in one word, then the others."""
    flags: list[str] = []
    others: list[str] = []
    left = list(reversed(arguments))
    while left:
        word = left.pop()
        if not word.startswith("--") and word not in parser.short:
            others.append(word)
            continue
        name, equals, value = word.partition("=")
        action = parser.short.get(name) or parser.flag(name[2:])
        name = action.option_strings[-1]
        if action.nargs != 0 and not equals:
            if not left or left[-1].startswith("--"):
                raise Refused(f"{name} needs a value; see: {parser.prog} --help")
            equals, value = "=", left.pop()
        flags.append(name + equals + value)
    return flags + others


def number(option: str, text: str | None, least: int = 0, most: int = 10**9) -> int | None:
    """A whole number given to an option.

    Raises:
        Refused: it is none, too small or too large.
    """
    if text is None:
        return None
    if not is_whole(text) or whole(text) < least:
        raise Refused(f"--{option} {text}: must be a whole number of at least {least}")
    if whole(text) > most:
        raise Refused(f"--{option} {text}: must be a whole number of at most {most}")
    return whole(text)


def decimal(option: str, text: str, least: float, most: float) -> float:
    """A number given to an option, which may have a fraction.

    Raises:
        Refused: it is none, too small or too large.
    """
    with contextlib.suppress(ValueError):
        if least <= float(text) <= most:
            return float(text)
    raise Refused(f"--{option} {text}: must be a number from {least:g} to {most:g}")

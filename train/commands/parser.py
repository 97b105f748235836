"""The parser of commands: argparse, and what this command line adds to it.

A flag is a config field (`--optim.lr 0.1`) or belongs to a command. Both are written with - or _. The value follows
after a blank or =. Flags may stand anywhere and are never abbreviated. If a flag is given twice, the last one wins.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import textwrap
from argparse import SUPPRESS, Action, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import Refused, is_whole, nearest, one_line, whole
from . import COMMANDS
from .completion_values import words

if TYPE_CHECKING:
    from .completion_values import Offer

_FIRST = {
    "name", "config", "task", "nproc", "gpus", "follow", "script", "spawn", "all", "checkpoint", "on", "nodes",
    "gpus-per-node", "time", "dry-run", "times", "epochs", "steps", "batch_size", "optim.lr",
}  # fmt: skip
"""Flags that help shows first, for commands that also take config fields."""

_LONGEST_CHOICES = 48
"""Characters. Help does not print a longer list of choices beside the flag; its text says where they are listed."""

_INVALID_CHOICE = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)")
_MISSING = "the following arguments are required: "
"""Beginning of argparse's message about missing arguments."""


class Parser(argparse.ArgumentParser):
    """The parser of one command. It looks its flags up by name."""

    def __init__(self, **kwargs: Any) -> None:
        self.flags: dict[str, Action] = {}
        """Maps a flag's name, written with _ and without dashes, to its action."""
        self.short: dict[str, Action] = {}
        """Maps a flag of one letter, such as `-n`, to its action."""
        self.takes_fields = False
        """Whether the config fields are flags of this command. Set before the arguments are added."""
        self.continues_run = False
        """Whether the command continues a run, which keeps the fields that are not given. Set with `takes_fields`."""
        self.only_fields: tuple[str, ...] = ()
        """The config fields that help lists; (): all. The command refuses the others. Set with `takes_fields`."""
        self.fields_section = ""
        """Heading of the help under which the most common fields are listed; '': among the first options."""
        self.rest: tuple[str, ...] = ()
        """The options each of which allows arguments after --; they are then in `options.arguments`."""
        self.verbatim: set[str] = set()
        """Flags whose value may itself start with --, as in `--on-restart --resume`."""
        formatter: Any = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, formatter_class=formatter, add_help=False, **kwargs)
        self._positionals.title = "arguments"
        self._sections: dict[str, Any] = {}

    def add_argument(
        self, *names: str, offer: Offer | None = None, section: str | None = None, **kwargs: Any
    ) -> Action:
        """Add an argument, as argparse does.

        Args:
            offer: returns what a shell completes as its value.
            section: heading of the help under which it is listed; None: among the first options, or, for a command
                that also takes config fields, under "more options".
        """
        is_first = not (self.takes_fields and names[0].startswith("-")) or names[-1].lstrip("-") in _FIRST
        title = section or (None if is_first else "more options")
        if title is None:
            return self._known(super().add_argument(*names, **kwargs), offer)
        if title not in self._sections:
            self._sections[title] = self.add_argument_group(title)
        return self._known(self._sections[title].add_argument(*names, **kwargs), offer)

    def _known(self, action: Action, offer: Offer | None) -> Action:
        for option in action.option_strings:
            if option.startswith("--"):
                self.flags[option[2:].replace("-", "_")] = action
            else:
                self.short[option] = action
        if offer is not None:
            action.completer = offer  # type: ignore[attr-defined] # argcomplete reads this attribute
        return action

    def add_fields(self) -> None:
        """Add every config field as a flag whose text goes into `options.flags`. Call after all other arguments."""
        from .. import config

        is_resume = self.prog == "train resume"
        title, note = "config fields (N: whole number, X: number, [default])", "They are also keys of --config FILE. "
        if is_resume:
            title, note = "config fields that a resume may change", "To change other fields: train fork. "
        elif self.only_fields:
            title, note = "config fields for this evaluation", "The run keeps its own. "
        elif self.continues_run:
            title, note = "config fields", "Other fields stay as they were. "
        of_task = "" if is_resume else "Settings of a task: --task.NAME VALUE."
        groups = {"": self.add_argument_group(title, f"{note}{of_task}".rstrip())}
        for info in config.fields().values():
            kind = config.type_name(info.annotation)
            no_default = self.continues_run or info.default in (None, "")
            default = "" if no_default else f" [{str(info.default).lower()}]"
            choices = [word for word in kind.split("|") if not word.isupper()]
            kind = kind if len(kind) <= _LONGEST_CHOICES else "NAME"
            name, of = info.name, info.name.rpartition(".")[0]
            if of not in groups:
                groups[of] = self.add_argument_group(f"fields of {of}")
            first = self._sections.get(self.fields_section, super())
            add = (first if name in _FIRST else groups[of]).add_argument
            is_shown = name in self.only_fields if self.only_fields else info.may_change or not is_resume
            text = one_line(info.help).replace("%", "%%") if is_shown else SUPPRESS
            action = add(f"--{name}", action=Field, metavar=kind + default, help=text)
            self._known(action, words(*choices) if choices else None)

    def flag(self, name: str) -> Action:
        """Return the flag of this name, given without its dashes.

        Raises:
            Refused: there is none.
        """
        plain = name.replace("-", "_")
        if plain not in self.flags and self.takes_fields and plain.startswith(("task.", "optim.args.")):
            self.add_argument(f"--{plain}", action=Field, help="known to the task or to torch only")
        if plain not in self.flags:
            known = [action.option_strings[-1][2:] for action in self.flags.values()]
            near = nearest(plain, known, otherwise=f"; see: {self.prog} --help", dashes="--")
            raise Refused(f"unknown flag --{plain}{near}")
        return self.flags[plain]

    def error(self, message: str) -> NoReturn:
        """Refuse what argparse finds wrong."""
        text, found = one_line(message), _INVALID_CHOICE.search(message)
        near = nearest(found[1], re.findall(r"'([^']*)'", found[2])) if found is not None else ""
        if missing := text.removeprefix(_MISSING) if text.startswith(_MISSING) else "":
            text = f"give {missing}"
            for action in self.flags.values():
                if action.required and isinstance(action.metavar, str):
                    text = text.replace(action.option_strings[-1], f"{action.option_strings[-1]} {action.metavar}")
        raise Refused(f"{text}{near}" if near else f"{text}; see: {self.prog} --help")


class Field(Action):
    """Stores the text of a config field in `flags`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs | {"dest": kwargs["option_strings"][0][2:], "default": SUPPRESS})

    def __call__(self, parser: Any, namespace: Namespace, values: Any, option_string: str | None = None) -> None:
        namespace.flags = {**namespace.flags, self.dest: values}


def parser_of(command: str) -> Parser:
    """Return the parser of a command, with the arguments and examples of its module."""
    summary, module = COMMANDS[command], importlib.import_module(f".{command}", __package__)
    text = f"{summary[0].upper()}{summary[1:]}.\n\n{example_text(module.EXAMPLES)}"
    parser = Parser(prog=f"train {command}", description=text)
    module.add_arguments(parser)
    parser.add_argument("--runs", metavar="DIR", help="Folder of the runs. Default: $TRAIN_RUNS, else ./runs.")
    parser.add_argument("-h", "--help", action="help", help="Show this help.")
    if parser.takes_fields:
        parser.add_fields()
    return parser


def example_text(examples: Mapping[str, str]) -> str:
    """Return the examples of a help text: each command line, and below it what it does."""
    lines = ["examples:"]
    for line, text in examples.items():
        lines += [f"  {line}", textwrap.fill(text, 78, initial_indent=" " * 6, subsequent_indent=" " * 6)]
    return "\n".join(lines)


def parse(parser: Parser, arguments: list[str]) -> Namespace:
    """Parse the options of a command. `flags` maps the config fields that were given to their text, and `words` are
    those of the command line.

    Raises:
        Refused: an argument is unknown, lacks its value, or is not allowed here.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(_in_order(parser, arguments[:end]), Namespace(flags={}))
    options.words = [*parser.prog.split(), *arguments]
    if any(getattr(options, name) is not None for name in parser.rest):
        options.arguments = arguments[end + 1 :]
    elif arguments[end:]:
        raise Refused(
            f"only launch, prove and sweep of a script, and fork, take arguments after --; see: {parser.prog} --help"
        )
    return options


def runs_folder(given: str | None) -> Path:
    """Return the folder of the runs: --runs, else $TRAIN_RUNS, else ./runs.

    Raises:
        Refused: --runs is empty, or the path exists and is not a folder.
    """
    if given == "":
        raise Refused("--runs is empty; give a folder, or leave --runs out for ./runs")
    folder = Path(given or os.environ.get("TRAIN_RUNS") or "runs").absolute()
    if os.path.lexists(folder) and not folder.is_dir():
        raise Refused(f"{folder} is not a folder; give the folder of the runs with --runs DIR")
    return folder


def _in_order(parser: Parser, arguments: list[str]) -> list[str]:
    """Reorder arguments so that argparse cannot misread them: flags first, each in one word with its value."""
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
            if not left or (left[-1].startswith("--") and name not in parser.verbatim):
                raise Refused(f"{name} needs a value; see: {parser.prog} --help")
            equals, value = "=", left.pop()
        flags.append(name + equals + value)
    return flags + others


def number(option: str, text: str | None, least: int = 0, most: int = 10**9) -> int | None:
    """Return the whole number that was given to an option; None if none was given.

    Raises:
        Refused: the text is no whole number, or is too small or too large.
    """
    if text is None:
        return None
    if not is_whole(text) or whole(text) < least:
        raise Refused(f"--{option} {text}: must be a whole number of at least {least}")
    if whole(text) > most:
        raise Refused(f"--{option} {text}: must be a whole number of at most {most}")
    return whole(text)


def decimal(option: str, text: str, least: float, most: float) -> float:
    """Return the number, possibly with a fraction, that was given to an option.

    Raises:
        Refused: the text is no number, or is too small or too large.
    """
    with contextlib.suppress(ValueError):
        if least <= float(text) <= most:
            return float(text)
    raise Refused(f"--{option} {text}: must be a number from {least:g} to {most:g}")

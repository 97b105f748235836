"""Shell completion, by argcomplete: `eval "$(register-python-argcomplete train)"`."""

from __future__ import annotations

import os
from argparse import SUPPRESS
from typing import NoReturn

from . import COMMANDS
from .parser import Parser, parser_of


def answer() -> NoReturn:
    """Write the completions for the word at the cursor, then exit. The shell started this process only for that."""
    import argcomplete

    begin = int(os.environ["_ARGCOMPLETE"])  # index of our own first argument on the line
    line = argcomplete.split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))[3]
    at, folder = _command(line, begin)
    if at is None:
        parser = Parser(prog="train")
        parser.add_argument("-h", "--help", action="store_true", help="show the help")
        parser.add_argument("--version", action="store_true", help="show the version")
        parser.add_argument("--runs", help="folder of the runs")
        parser.add_argument("command", offer=lambda **_: COMMANDS)
    else:
        parser = parser_of(line[at])
        parser.set_defaults(runs=folder)
        _add_twins(parser)
        os.environ["_ARGCOMPLETE"] = str(at + 1)
    argcomplete.autocomplete(parser, always_complete_options=False)
    raise SystemExit(1)  # not reached: argcomplete exits


def _command(line: list[str], begin: int) -> tuple[int | None, str | None]:
    """Return the index of the command on the line, and the value of a --runs before it."""
    folder = None
    at = begin
    while at < len(line) and line[at].startswith("--runs"):
        _, equals, value = line[at].partition("=")
        folder = value if equals else line[at + 1] if at + 1 < len(line) else None
        at += 1 if equals else 2
    return at if at < len(line) and line[at] in COMMANDS else None, folder


def _add_twins(parser: Parser) -> None:
    """Add the spelling with - for _ of every flag, which otherwise only our own parser knows."""
    for name, action in list(parser.flags.items()):
        for twin in {name, name.replace("_", "-")} - {option.lstrip("-") for option in action.option_strings}:
            does = "store_true" if action.nargs == 0 else "store"
            offer = getattr(action, "completer", None)
            parser.add_argument(f"--{twin}", action=does, dest=SUPPRESS, help=SUPPRESS, offer=offer)

"""Whatever is typed for a field is taken, or refused in a line that a terminal can show: never a traceback."""

from __future__ import annotations

import itertools
import typing
from pathlib import Path

import pytest

from train.commands import options
from train.commands.parser import parse, parser_of
from train.config.fields import fields, parse_value
from train.errors import Refused
from train.launcher.request import Request
from train.tasks import load

pytestmark = pytest.mark.never_forgiven

ODD = [
    "", " ", "0", "-1", "-0.0", "1e308", "1e309", "5e-324", "inf", "-inf", "nan", "9" * 5000, str(2**63), str(2**128),
    "1000000000000", "true", "none", "[1,[2,3]]", "[" * 5000, "{'a':1}", "é", "\u0661", "\u00b2", "a\nb", "\x1b[2J",
    "../..", "'", "%s%n", "{0}", ",", "=", "0x10", "1_000", "+5", "auto", "best", "\udc80", "x" * 5000, "*", "~",
]  # fmt: skip
TASK = """
from dataclasses import dataclass, field

@dataclass
class Settings:
    sizes: list[int] = field(default_factory=list)

def model(config): ...
def datasets(config): ...
def loss(model, batch): ...
"""


def test_odd_values_of_fields_are_taken_or_refused_in_a_line(tmp_path: Path) -> None:
    file = tmp_path / "odd.py"
    file.write_text(TASK)
    task = load(str(file))
    assert task.Settings is not None
    own = typing.get_type_hints(task.Settings)
    parser = parser_of("run")
    for name, value in itertools.product([*fields(), "task.sizes"], ODD):
        try:
            flags = parse(parser, ["digits", f"--{name}={value}"]).flags
            assert flags == {name: value}
            is_own = name.startswith("task.")
            annotation = own[name.removeprefix("task.")] if is_own else fields()[name].annotation
            parse_value(name, annotation, value)
            if not is_own:
                options.check_now(Request("digits", flags=flags), None)
        except Refused as error:
            assert len(str(error).splitlines()) == 1 and str(error).isprintable()

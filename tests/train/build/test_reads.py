"""Which fields a task's functions read, as a check records it; what cannot be known counts as read."""

from __future__ import annotations

import copy
import dataclasses
import multiprocessing
import pickle
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest

from train import config as configuration
from train.build.reads import recording
from train.config import Config

FIELDS = ("optim.lr", "optim.momentum", "data.root", "task.width")
ALL, OPTIM = list(FIELDS), ["optim.lr", "optim.momentum"]
kept: list[Any] = []


@dataclasses.dataclass(frozen=True)
class Settings:
    width: int = 3

    @property
    def double(self) -> int:
        return 2 * self.width


def read_by(function: Callable[[Config], Any]) -> list[str]:
    config = configuration.build({"epochs": 1.0}, Settings)
    with recording(config) as reads:
        assert config.optim.momentum, "the engine's own reads do not count"
        with reads.noting():
            made = function(config)
        assert config.data.root is not None
    del made
    assert "__getattribute__" not in vars(Config) | vars(Settings)
    return [name for name in FIELDS if reads.has(name)]


def in_a_thread(config: Config) -> None:
    one = threading.Thread(target=lambda: config.optim.lr)
    one.start()
    one.join()


def in_a_process(config: Config) -> None:
    one = multiprocessing.get_context("fork").Process(target=in_a_thread, args=(config,))
    one.start()
    one.join()


def in_a_library(config: Config) -> Any:
    module = types.ModuleType("lib")
    exec(compile("def make(o): return o.lr", f"{sys.prefix}/lib/site-packages/lib.py", "exec"), module.__dict__)
    return module.make(config.optim)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda config: None, []),
        (lambda config: config.optim.lr, ["optim.lr"]),
        (lambda config: getattr(config.optim, "lr"), ["optim.lr"]),  # noqa: B009
        (lambda config: (lambda o: o.lr)(config.optim), ["optim.lr"]),
        (lambda config: config.task.double, ["task.width"]),
        (repr, ALL),
        (lambda config: vars(config.optim)["lr"], OPTIM),
        (lambda config: [field.name for field in dataclasses.fields(config.optim)], OPTIM),
        (lambda config: dataclasses.replace(config.task), ["task.width"]),
        (lambda config: copy.copy(config.optim), OPTIM),
        (copy.deepcopy, ALL),
        (pickle.dumps, ALL),
        (dataclasses.asdict, ALL),
        # kept: by an object, and by a function that it returns
        (lambda config: kept.append(config.task), ["task.width"]),
        (lambda config: lambda: config, ALL),
        (in_a_thread, ["optim.lr"]),
        (in_a_process, ALL),
        (in_a_library, OPTIM),
    ],
)
def test_what_is_read_or_may_be_read_later_is_known(function: Callable[[Config], Any], expected: list[str]) -> None:
    assert read_by(function) == expected

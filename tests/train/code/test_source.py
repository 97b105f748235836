"""What a task's source says of it: the fields that it reads, and the names that nothing uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tasks import TASKS
from train.code.source import Source, of_task

ROOT = Path(__file__).parents[3]
PLAIN = """
import torch
from torch import nn, optim
def model(config): return nn.Linear(5, config.task.width)
def datasets(config): return torch.utils.data.TensorDataset(torch.ones(8, 5)), None
def loss(model, batch): return model(batch[0]).mean()
"""


def source(text: str, *modules: str) -> Source:
    return Source((PLAIN + text).encode(), lambda: [module.encode() for module in modules], "task")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def optimizer(model, config): return optim.SGD(model.parameters(), 1, weight_decay=0.1)", []),
        ("def optimizer(m, c): return optim.SGD(m.parameters(), lr=c.optim.lr, momentum=c.optim.momentum)",
         ["lr", "momentum"]),
        ("def optimizer(model, config): return optim.SGD(model.parameters(), getattr(config.optim, 'lr'))",
         ["lr", "momentum", "name"]),
        ("def make(m, x):\n    o = x.optim\n    return optim.SGD(m.parameters(), o.lr)", ["lr"]),
        ("def make(m, o): return optim.SGD(m, **vars(o))\ndef optimizer(m, hp): return make(m, hp.optim)",
         ["lr", "momentum", "name"]),
        ("optimizer = lambda m, hp: optim.SGD(m.parameters(), hp.optim.lr)", ["lr"]),
        # what is called alike
        ("class Lit:\n    def __init__(self, m): self.optim = m.make(1)\n    def go(self): return self.optim", []),
    ],
)  # fmt: skip
def test_fields_that_are_spelt_out_are_found(text: str, expected: list[str]) -> None:
    made = source(text)
    for reads in (made.reads, made.may_read):
        assert [name for name in ("lr", "momentum", "name") if reads(f"optim.{name}")] == expected


def test_code_that_gets_the_whole_configuration_may_read_any_field() -> None:
    for text in ("def optimizer(model, hp): return make(model, hp)", "class Net(lib.Net):\n    f = lib.make(self.cfg)"):
        assert source(text).may_read("optim.lr") and not source(text).reads("optim.lr")


def test_a_field_may_be_read_in_a_module() -> None:
    text = "from helpers import make\ndef optimizer(model, config): return make(model, config)"
    made = source(text, "def make(model, settings): return SGD(model, lr=settings.optim.lr)")
    assert made.reads("optim.lr") and not made.reads("optim.momentum")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def sampler(config): ...\ndef training_step(model, batch): ...", {"sampler": "", "training_step": "loss"}),
        ("CONFIG = {'optim.lr': 0.5}\nclass Config:\n    width = 64", {"CONFIG": "DEFAULTS", "Config": "Settings"}),
        ("import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass Args:\n    w: int = 64", {"Args": "Settings"}),
        ("if torch.cuda.is_available():\n    def callbacks(): ...\nelse:\n    x = None", {"callbacks": "after_step"}),
        ("def forever(n): return forever(n - 1)", {"forever": ""}),
        ("@torch.no_grad()\ndef validate(model): ...", {"validate": "metrics"}),
        ('def documented():\n    """documented() is never called."""', {"documented": ""}),
        # used, meant, or none of the file's own
        ("def helper(): ...\nX = helper()", {}),
        ("def _helper(): ...\nconfig = {}\nNAMES = ['a']", {}),
        ("def main(): ...\nif __name__ == '__main__':\n    main()", {}),
        ("if __name__ == '__main__':\n    def training_step(): ...", {}),
        ("from other import training_step, CONFIG", {}),
        ("@register\nclass Net: ...", {}),
        ("class A:\n    def __init_subclass__(cls): ...\nclass B(A): ...\nX = A", {}),
        ("class Row: ...\ndef f(rows: 'list[Row]'): ...\nX = f", {}),
        ("LABELS = {'cat': 0}\nX = globals()['LABELS']", {}),
        ("DEFAULTS = {}\nclass Settings: ...\ndef after_step(model, step, stateful): ...", {}),
    ],
)  # fmt: skip
def test_names_that_nothing_uses_are_found_with_their_name_here(text: str, expected: dict[str, str]) -> None:
    assert source(text).unused() == expected


def test_what_another_module_of_the_task_imports_is_used() -> None:
    for module in (
        "from task import helper",
        "from .task import helper",
        "import task\ntask.helper()",
        "from task import *",
    ):
        assert source("def helper(): ...", module).unused() == {}
    assert source("def helper(): ...", "from other import thing").unused() == {"helper": ""}


@pytest.mark.parametrize(
    "file",
    [*ROOT.glob("examples/*.py"), *ROOT.glob("train/tasks/[a-z]*.py"), *TASKS.glob("*.py")],
    ids=lambda p: p.name,
)
def test_the_tasks_of_this_checkout_have_none(file: Path) -> None:
    assert of_task(file, file.parent).unused() == {}

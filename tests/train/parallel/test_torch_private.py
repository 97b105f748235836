"""An optimizer's step by the shorter way: whoever wants to know of it still does."""

from __future__ import annotations

import collections
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torchs
from torch.optim.lr_scheduler import ConstantLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import profile

from train.parallel.torch_private import optimizer_step


@pytest.fixture
def optimizer() -> torch.optim.Optimizer:
    model = nn.Linear(2, 2)
    made = torch.optim.SGD(model.parameters(), lr=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return made


@pytest.fixture
def ways(optimizer: torch.optim.Optimizer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows with each step that is made with all that torch puts around it: this is called in there, for profilers."""
    seen: list[str] = []
    for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):  # other tests may have left some
        monkeypatch.setattr(torchs, name, collections.OrderedDict())
    monkeypatch.setattr(optimizer, "_optimizer_step_code", lambda: seen.append("whole"))
    return seen


def moved(optimizer: torch.optim.Optimizer) -> bool:
    before = [parameter.clone() for parameter in optimizer.param_groups[0]["params"]]
    optimizer_step(optimizer)
    after = optimizer.param_groups[0]["params"]
    return all(torch.equal(new, old - 0.5) for new, old in zip(after, before, strict=True))


def test_a_step_that_nobody_watches_is_made_without_what_torch_puts_around_it(
    optimizer: torch.optim.Optimizer, ways: list[str]
) -> None:
    assert moved(optimizer)
    assert ways == []


def test_hooks_of_one_optimizer_and_of_all_are_called(optimizer: torch.optim.Optimizer, ways: list[str]) -> None:
    called: list[str] = []
    for name, register in {
        "pre": optimizer.register_step_pre_hook, "post": optimizer.register_step_post_hook,
        "all pre": register_optimizer_step_pre_hook, "all post": register_optimizer_step_post_hook,
    }.items():  # fmt: skip
        handle = register(lambda *_, name=name: called.append(name))
        assert moved(optimizer), name
        handle.remove()
    assert called == ["pre", "post", "all pre", "all post"]
    assert moved(optimizer)
    assert ways == 4 * ["whole"]


def test_a_profiler_sees_the_step(optimizer: torch.optim.Optimizer) -> None:
    with profile() as profiler:
        assert moved(optimizer)
    assert "Optimizer.step#SGD.step" in {event.key for event in profiler.key_averages()}


def test_a_step_that_an_object_has_for_itself_is_called(optimizer: torch.optim.Optimizer) -> None:
    schedule = ConstantLR(optimizer)  # counts the steps of its optimizer, to warn of a wrong order
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    assert moved(optimizer)
    assert schedule.optimizer.__dict__["step"] is optimizer.step
    assert getattr(optimizer, "_opt_called", False)


def test_a_step_that_its_user_has_wrapped_is_called(
    optimizer: torch.optim.Optimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    whole: Any = type(optimizer).step

    @functools.wraps(whole)
    def watched(self: torch.optim.Optimizer) -> Any:
        seen.append("mine")
        return whole(self)

    monkeypatch.setattr(type(optimizer), "step", watched)
    assert moved(optimizer)
    assert seen == ["mine"]


class _Own(torch.optim.Optimizer):
    """An optimizer as papers bring it along."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(0.5 * parameter.grad)


def test_an_optimizer_that_is_nobodys_makes_its_own_step() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    assert moved(_Own([parameter]))

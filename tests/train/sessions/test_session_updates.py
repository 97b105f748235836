"""Updates are counted where an optimizer steps, and a save waits while a gradient is pending."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.train.sessions.ranks import save_now, where
from train.sessions.state import Position, State

pytestmark = pytest.mark.never_forgiven


def opened(folder: Path, **objects: Any) -> State:
    state = State(where(folder))
    state.register(**objects)
    return state


def backward(model: nn.Module, scale: Any = 1.0) -> None:
    (model(torch.ones(4, 2)).sum() * scale).backward()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("zero_first", [True, False])
def test_between_two_micro_batches_a_gradient_is_pending(tmp_path: Path, zero_first: bool, set_to_none: bool) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state, seen = opened(tmp_path, model=model, optimizer=optimizer), []
    for number in range(6):
        if zero_first and number % 2 == 0:
            optimizer.zero_grad(set_to_none=set_to_none)
        backward(model)
        if number % 2:
            optimizer.step()
            if not zero_first:
                optimizer.zero_grad(set_to_none=set_to_none)
        state.border()
        seen.append((state.updates, state.is_clean))
    assert seen == [(0, False), (1, True), (1, False), (2, True), (2, False), (3, True)]


def test_a_backward_after_the_step_is_pending(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = opened(tmp_path, model=model, optimizer=optimizer)
    backward(model)
    optimizer.step()
    backward(model)
    state.border()
    assert state.updates == 1 and not state.is_clean


def test_a_step_that_the_scaler_skips_counts(tmp_path: Path) -> None:
    """Or a run whose gradients are infinite for long could not stop."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    state = opened(tmp_path, model=model, optimizer=optimizer, scaler=scaler)
    before = model.weight.clone()
    for number in range(3):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(4, 2)).sum() * (float("inf") if number < 2 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        state.border()
        assert state.updates == number + 1 and state.is_clean
        assert torch.equal(model.weight, before) == (number < 2)
    assert save_now(state, Position(0, 3, 3), {}, 0)
    model_2 = nn.Linear(2, 2)
    scaler_2 = torch.amp.GradScaler("cpu")
    optimizer_2 = torch.optim.SGD(model_2.parameters(), lr=0.1)
    again = opened(tmp_path, model=model_2, optimizer=optimizer_2, scaler=scaler_2)
    assert again.load() is not None and again.is_clean and scaler_2.get_scale() == scaler.get_scale() == 65536 / 4


def test_two_optimizers_of_a_gan_make_one_update_a_batch(tmp_path: Path) -> None:
    """The generator's backward leaves gradients in the discriminator, which its next step may use: they are saved."""

    def parts() -> dict[str, Any]:
        torch.manual_seed(3)
        made, judge = nn.Linear(2, 2), nn.Linear(2, 1)
        return {
            "made": made, "judge": judge,
            "of_made": torch.optim.SGD(made.parameters(), lr=0.1),
            "of_judge": torch.optim.SGD(judge.parameters(), lr=0.1),
        }  # fmt: skip

    def step(given: dict[str, Any]) -> None:
        given["judge"](torch.ones(4, 2)).sum().backward()
        given["of_judge"].step()
        given["of_judge"].zero_grad()
        given["judge"](given["made"](torch.ones(4, 2))).sum().backward()
        given["of_made"].step()
        given["of_made"].zero_grad()

    def run(folder: Path, steps: int) -> State:
        given = parts()
        state = opened(folder, **given)
        saved = state.load()
        state.put_gradients()
        for number in range(saved.position.batch if saved else 0, steps):
            step(given)
            state.border()
            assert state.updates == number + 1 and state.is_clean
        assert save_now(state, Position(0, steps, steps), {}, 0)
        return state

    whole = run(tmp_path / "whole", 6).digest()
    run(tmp_path / "parts", 3)
    assert run(tmp_path / "parts", 6).digest() == whole


def test_without_an_optimizer_batches_count(tmp_path: Path) -> None:
    state = opened(tmp_path, model=nn.Linear(2, 2))
    for _ in range(3):
        state.border()
    assert state.updates == 3 and state.is_clean


class Two(nn.Module):
    """A gate that only some batches use, and the smallest parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.body, self.gate = nn.Linear(2, 3), nn.Parameter(torch.ones(1))

    def forward(self, uses_gate: bool, is_open: bool = True) -> Tensor:
        found = self.body(torch.ones(4, 2))
        gate = self.gate if is_open else self.gate.clamp(max=0.5)  # its gradient is 0 then
        return (found * gate if uses_gate else found).sum()


@pytest.mark.parametrize("way", ["unused", "zero"])
def test_a_gradient_is_pending_whichever_parameter_has_it(tmp_path: Path, way: str) -> None:
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state, seen = opened(tmp_path, model=model, optimizer=optimizer), []
    for number in range(5):  # the step stands at the top of the body
        if number == 4:
            optimizer.step()
            optimizer.zero_grad()
        model(way == "zero" or number == 3, is_open=way != "zero" or number == 3).backward()
        state.border()
        seen.append(state.is_clean)
    assert seen == [False] * 5 and state.updates == 1


class Sharpness(torch.optim.Optimizer):
    """SAM, as public implementations write it: nobody calls its step()."""

    def __init__(self, parameters: Any, base: Any, **options: Any) -> None:
        super().__init__(parameters, options)
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                self.state[one]["old"] = one.clone()
                one.add_(one.grad * 0.05)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                one.copy_(self.state[one]["old"])
        self.base.step()
        self.zero_grad()


class Bare(torch.optim.SGD):
    """An optimizer whose step() is never called: the loop changes the weights with its rate."""


@pytest.mark.parametrize("kind", ["sam", "bare"])
def test_what_changes_registered_weights_is_an_update(tmp_path: Path, kind: str) -> None:
    def run(folder: Path, steps: int) -> str:
        torch.manual_seed(4)
        model = nn.Linear(2, 2)
        sam = Sharpness(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        bare = Bare(model.parameters(), lr=0.1)
        optimizer = sam if kind == "sam" else bare
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        place = where(folder)
        state = State(place)
        state.register(scheduler=scheduler, optimizer=optimizer, model=model)
        saved = state.load()
        for number in range(saved.position.batch if saved else 0, steps):
            torch.manual_seed(number)
            model(torch.randn(4, 2)).square().sum().backward()
            if kind == "sam":
                sam.first_step()
                model(torch.randn(4, 2)).square().sum().backward()
                sam.second_step()
            else:
                with torch.no_grad():
                    for one in model.parameters():
                        one.sub_(bare.param_groups[0]["lr"] * one.grad)
                        one.grad = None
            scheduler.step()
            state.border()
            assert state.updates == number + 1 and state.is_clean
        assert save_now(state, Position(0, steps, steps), {}, 0) and not place.named
        return state.digest()

    whole = run(tmp_path / "whole", 6)
    run(tmp_path / "parts", 3)
    assert run(tmp_path / "parts", 6) == whole


def test_an_optimizer_made_anew_counts_and_is_named_once_it_lives_longer_than_a_body(tmp_path: Path) -> None:
    model, place = nn.Linear(2, 2), where(tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = State(place)
    state.register(model=model, optimizer=optimizer)

    def body(*optimizers: torch.optim.Optimizer) -> None:
        backward(model)
        for one in optimizers:
            one.step()
            one.zero_grad()
        state.border()

    for _ in range(3):  # as a search for an adversarial example does
        body(torch.optim.Adam(model.parameters()), optimizer)
    assert state.updates == 3 and state.is_clean and not place.named
    anew = torch.optim.Adagrad(model.parameters())
    for _ in range(3):
        body(anew)
    assert state.updates == 6 and state.is_clean
    assert place.named == ["Adagrad: an optimizer that is not registered; a resume starts it from zero; register it"]


def test_a_loop_whose_optimizer_nobody_knows_is_asked_for_it(tmp_path: Path, caplog: Any) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    state = opened(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    unknown = torch.optim.RMSprop(other.parameters())
    for _ in range(60):
        backward(other)
        unknown.step()
        state.border()
    assert caplog.text.count("no update in 50 batches: register the RMSprop") == 1 and state.updates == 0


@pytest.mark.parametrize("set_to_none", [True, False])
def test_pending_gradients_are_saved_and_come_back_where_the_loop_continues(tmp_path: Path, set_to_none: bool) -> None:
    """Also those that are zero: momentum moves a parameter whose gradient is 0, and not one that has none."""

    def run(folder: Path, first: int, last: int) -> str:
        model = Two()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        state = opened(folder, model=model, optimizer=optimizer)
        saved = state.load()
        assert (saved is not None) == bool(first)
        optimizer.zero_grad(set_to_none=set_to_none)  # of the head of the epoch
        state.put_gradients()
        for number in range(first, last):
            model(number < 3).backward()
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
            state.border()
        assert save_now(state, Position(0, last, state.updates), {}, 0)
        return state.digest()

    whole = run(tmp_path / "whole", 0, 9)
    for at in (3, 4, 5):
        run(tmp_path / str(at), 0, at)
        assert run(tmp_path / str(at), at, 9) == whole, at

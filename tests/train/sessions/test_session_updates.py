"""Updates are counted where an optimizer steps, and a save waits while a gradient is pending."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.train.sessions.ranks import where
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
    assert state.save(Position(0, 3, 3), {}, 0)
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
        for number in range(saved.position.batch if saved else 0, steps):
            step(given)
            state.border()
            assert state.updates == number + 1 and state.is_clean
        assert state.save(Position(0, steps, steps), {}, 0)
        return state

    whole = run(tmp_path / "whole", 6).digest()
    run(tmp_path / "parts", 3)
    assert run(tmp_path / "parts", 6).digest() == whole


def test_without_an_optimizer_batches_count(tmp_path: Path) -> None:
    state = opened(tmp_path, model=nn.Linear(2, 2))
    for _ in range(3):
        state.border()
    assert state.updates == 3 and state.is_clean

"""The check of the model in the first steps of an attempt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from train.errors import TrainingFailed
from train.parallel.world import World
from train.trainer.model_check import ModelCheck


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0


class Telling(Counting):
    def get_extra_state(self) -> Any:
        return {"calls": self.calls}


@pytest.mark.parametrize(("part", "is_told"), [(Counting, True), (Telling, False)])
def test_a_count_is_told_of_unless_it_is_in_the_extra_state_of_its_module(part: type[Counting], is_told: bool) -> None:
    model = nn.Sequential(nn.Linear(1, 1), part())
    check = ModelCheck(model, [], list)
    check.begin()
    model[1].calls += 1
    assert ["1.calls" in warning for warning in check.end()] == [True] * is_told


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.bool, torch.bfloat16, torch.complex64])
def test_a_weight_of_any_type_is_looked_at_for_changes(dtype: torch.dtype) -> None:
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.tensor([0.0, 1.0, 1.0]).to(dtype), requires_grad=False)
    check = ModelCheck(model, [], list)
    check.begin()
    check.end()
    check.begin()
    model.weight.data = torch.tensor([0.0, 1.0, 0.0]).to(dtype)  # which torch does not count
    with pytest.raises(TrainingFailed, match="changes its parameter weight"):
        check.end()


class Written(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.ones(3)), nn.BatchNorm1d(3)
        for name in ("centre", "same", "moved", "late"):
            self.register_buffer(name, torch.zeros(3))
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.register_buffer("calls", torch.tensor(0))


def _micro_batch(model: Any, name: str, points: torch.Tensor) -> None:
    with torch.no_grad():
        model.norm(points)
        model.same.copy_(model.weight)
        model.cache = torch.ones(2 + len(points))
        model.calls += 1
        if name == "centre":
            model.centre = 0.9 * model.centre + 0.1 * points.mean(0)
        if name == "moved":
            model.moved.data.add_(points.mean(0))  # which torch does not count


def test_a_buffer_is_named_in_which_each_micro_batch_leaves_another_value() -> None:
    alone, points = (
        World(0, size=1, local_rank=0, device=torch.device("cpu")),
        torch.rand(4, 3, generator=torch.Generator().manual_seed(1)),
    )
    for name, micros, world, is_named in (
        ("centre", 2, alone, True),
        ("moved", 3, alone, True),
        ("centre", 1, alone, False),  # it is the whole batch's
        ("centre", 2, None, False),  # their sums are ordered
        ("", 3, alone, False),
    ):
        model = Written()
        check, said = ModelCheck(model, [], list, world=world), []
        for _ in range(2):
            check.begin()
            for number in range(micros):
                _micro_batch(model, name, points[number : number + 2])
                check.after_micro_batch(is_last=number == micros - 1)
            check.end()
            said.append(check.written_buffer())
            model.late += points[0]  # after_step
        assert [f"the buffer {name}," in line for line in said] == [is_named, False], (name, micros)

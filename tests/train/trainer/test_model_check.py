"""The check of the model in the first steps of an attempt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from train.errors import TrainingFailed
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
    with pytest.raises(TrainingFailed, match="updates its parameter weight"):
        check.end()

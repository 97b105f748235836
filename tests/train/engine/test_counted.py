"""What a model counts in plain attributes is warned of, where no checkpoint holds it."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from train.engine import counted


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
    before = counted.numbers(model)
    model[1].calls += 1
    warning = counted.warning(before, counted.numbers(model))
    assert ("1.calls" in warning) == is_told and bool(warning) == is_told

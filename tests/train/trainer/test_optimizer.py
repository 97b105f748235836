"""The learning rate as a function of the step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.config import Config, build
from train.trainer.optimizer import rate_factor, rate_scale


def config(**schedule: Any) -> Config:
    batch = schedule.pop("batch_size", 64)
    return build({"batch_size": batch} | {f"schedule.{key}": value for key, value in schedule.items()})


def rates(made: Config, steps_per_epoch: int, total: int) -> list[float]:
    return [rate_factor(made, step, steps_per_epoch, total) for step in range(total)]


@pytest.mark.parametrize(
    ("rule", "batch", "base", "expected"),
    [("none", 1024, 256, 1), ("linear", 1024, 256, 4), ("sqrt", 1024, 256, 2), ("linear", 64, 256, 0.25)],
)
def test_the_peak_follows_the_scaling_rule(rule: str, batch: int, base: int, expected: float) -> None:
    assert rate_scale(config(scaling=rule, batch_size=batch, base_batch_size=base)) == expected


def test_the_warm_up_rises_in_equal_steps_and_ends_at_the_peak() -> None:
    assert rates(config(warmup_epochs=2, decay="constant"), 5, 20) == pytest.approx(
        [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0] + [1.0] * 10
    )


def test_cosine_falls_from_the_peak_through_half_to_almost_nothing() -> None:
    made = rates(config(decay="cosine"), 10, 100)
    assert made[0] == 1
    assert made[50] == pytest.approx(0.5)
    assert made[25] == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    assert 0 < made[99] < 0.001
    assert made == sorted(made, reverse=True)


def test_cosine_begins_where_the_warm_up_ends() -> None:
    made = rates(config(decay="cosine", warmup_epochs=1), 10, 30)
    assert made[9] == made[10] == 1
    assert made[20] == pytest.approx(0.5)


def test_step_decay_drops_by_gamma_each_so_many_epochs() -> None:
    made = rates(config(decay="step", step_epochs=2.0, gamma=0.1), 3, 15)
    assert made == pytest.approx([1.0] * 6 + [0.1] * 6 + [0.01] * 3)


def test_step_decay_takes_fractions_of_epochs_without_rounding_errors() -> None:
    made = rates(config(decay="step", step_epochs=0.1, gamma=0.5), 10, 10)
    assert made == pytest.approx([0.5**step for step in range(10)])


def test_a_warm_up_longer_than_the_run_still_rises_to_the_peak() -> None:
    assert rates(config(warmup_epochs=100), 10, 4) == [0.25, 0.5, 0.75, 1.0]


@settings(max_examples=150, deadline=None)
@given(
    decay=st.sampled_from(["constant", "cosine", "step"]),
    warmup=st.floats(0, 5),
    per_epoch=st.integers(1, 50),
    total=st.integers(1, 200),
)
def test_every_step_has_a_positive_rate_up_to_the_peak(decay: str, warmup: float, per_epoch: int, total: int) -> None:
    made = rates(config(decay=decay, warmup_epochs=warmup), per_epoch, total)
    assert all(0 < rate <= 1 for rate in made)


def test_a_run_trains_with_these_rates(steady: Any) -> None:
    lines = [line for line in steady.station.metrics("one") if "lr" in line]
    made = config(warmup_epochs=0.5)
    assert [line["lr"] for line in lines] == pytest.approx([0.1 * rate_factor(made, step, 4, 10) for step in range(10)])


RATED = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Rate(torch.Tensor):
    asked = 0

    def __float__(self):
        Rate.asked += 1
        if Rate.asked > 3:
            raise AssertionError("the host asked for a rate again and again, and on a GPU waited for it")
        return super().__float__()

def datasets(config):
    return TensorDataset(torch.randn(32, 4)), None

def model(config):
    return nn.Linear(4, 4)

def optimizer(model, config):
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25).as_subclass(Rate), foreach=False)

def loss(model, batch):
    return model(batch[0]).square().mean()
"""


def test_a_rate_that_is_a_tensor_is_read_once(engine: Any, tmp_path: Path) -> None:
    task = tmp_path / "rated.py"
    task.write_text(RATED)
    record = engine.run("rated", task=task, steps=8, epochs=None, schedule__warmup_epochs=0, schedule__decay="constant")
    assert record["state"] == "finished", engine.said("rated")
    assert [line["lr"] for line in engine.station.metrics("rated")] == [0.25] * 8

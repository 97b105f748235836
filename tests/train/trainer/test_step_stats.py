"""What a rank tells the others in a step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from train.build.loss import BatchValue
from train.signals import StopRequest
from train.trainer.step_stats import STATS, Readback, StepResult, StepStats

CPU = torch.device("cpu")
LOSSES = st.lists(st.tuples(st.floats(width=32), st.integers(1, 1000)), min_size=1, max_size=6)


def loss_of(value: float, samples: int, count: Tensor | float | None = None) -> BatchValue:
    return BatchValue(torch.tensor(value, requires_grad=True) * 1, samples, count)


def of_rank(dtype: torch.dtype = torch.float32, stop: StopRequest | None = None, **given: Any) -> StepStats:
    settings = {"is_ordered": False, "leaves_out": False, "stop": stop or StopRequest(())} | given
    return StepStats(dtype, CPU, **settings)


def own(stats: StepStats) -> dict[str, float]:
    return dict(zip(STATS, stats.tensor().tolist(), strict=True))


@given(steps=st.lists(LOSSES, min_size=1, max_size=4), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_sums_have_the_bits_of_products_and_sums_of_tensors(
    steps: list[list[tuple[float, int]]], dtype: torch.dtype
) -> None:
    stats = of_rank(dtype)
    for losses in steps:
        stats.begin(len(losses))
        expected: Tensor | float = 0.0
        for number, (value, samples) in enumerate(losses):
            stats.add(number, loss_of(value, samples))
            expected = expected + torch.tensor(value).to(dtype) * samples
        found = own(stats)
        assert found["loss"] == float(expected) or (math.isnan(found["loss"]) and math.isnan(float(expected)))
        assert found["count"] == sum(samples for _, samples in losses)


def test_nothing_of_a_step_is_left_in_the_next() -> None:
    stop = StopRequest(())
    saves = iter([True, False, False])
    stats = of_rank(stop=stop, save=lambda: next(saves))
    stats.begin(1)
    stats.add(0, loss_of(2.0, 8, count=torch.tensor(5)))
    stop.ask("user", "train stop")
    assert own(stats) == {"loss": 2, "count": 5, "stop": 1, "save": 1, "counted": 1, "copy": 0}
    stop.asked = False
    stats.begin(1)
    assert own(stats) == dict.fromkeys(STATS, 0.0)
    stats.begin(1)
    stats.add(0, loss_of(2.0, 8))
    assert own(stats) == {"loss": 16, "count": 8, "stop": 0, "save": 0, "counted": 0, "copy": 0}


def test_the_first_of_several_counts_may_be_a_number_and_the_next_a_tensor() -> None:
    stats = of_rank()
    stats.begin(2)
    stats.add(0, loss_of(2.0, 8, count=3))
    stats.add(1, loss_of(1.0, 8, count=torch.tensor(4, dtype=torch.bfloat16)))
    assert own(stats)["count"] == 7 and own(stats)["loss"] == 3


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_parts_are_added_in_the_order_of_the_micro_batches(order: tuple[int, ...]) -> None:
    values = [1e8, 1.0, -1e8]
    stats = of_rank(is_ordered=True, save=lambda: True)
    stats.begin(3)
    for number in order:
        stats.add(number, loss_of(values[number], 1))
    read = dict(zip(STATS, stats.summed(stats.tensor()).tolist(), strict=True))
    total = torch.tensor(values).sum().item()
    assert read == {"loss": total, "count": 3, "stop": 0, "save": 1, "counted": 0, "copy": 0}


def test_a_repeated_micro_batch_says_only_whether_its_loss_counts() -> None:
    stats = of_rank()
    stats.begin(2)
    stats.add(1, loss_of(2.0, 8, count=3), is_repeated=True)
    assert own(stats) == {"loss": 0, "count": 0, "stop": 0, "save": 0, "counted": 1, "copy": 0}


@pytest.mark.parametrize(
    ("leaves_out", "count", "scale"), [(False, None, None), (True, None, 2.0), (False, 4, 4.0), (True, 0, 0.0)]
)
def test_gradients_are_scaled_by_what_was_counted(leaves_out: bool, count: int | None, scale: float | None) -> None:
    stats = of_rank(leaves_out=leaves_out)
    stats.begin(1)
    stats.add(0, loss_of(1.0, 8, count))
    factor = stats.scale(stats.summed(stats.tensor()), 16)
    assert (None if factor is None else factor.item()) == scale


def test_the_host_reads_the_sums_of_each_update_and_the_figures_of_the_step() -> None:
    readback, wide = Readback[str](CPU), 2.0**24 + 1  # no float32
    sums = {"d": torch.arange(6.0), "g": torch.arange(6.0) + 6}
    figures = {"grad_norm": torch.tensor(wide, dtype=torch.float64)}
    readback.put("first", StepResult(sums, figures, []))
    readback.put("second", StepResult({"d": sums["g"]}, {}, []))
    first, second = readback.take(everything=False)
    assert first == ("first", {"d": [*range(6)], "g": [*range(6, 12)]}, {"grad_norm": wide})
    assert second == ("second", {"d": [*range(6, 12)]}, {})

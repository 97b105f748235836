"""What a sample costs is what its products cost; no GPU is needed to count it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from train.data.plan import Plan, Sharing
from train.trainer.flops import Flops, peak


def test_a_product_costs_two_operations_forward_and_four_backward() -> None:
    plan, model = (
        Plan(length=40, batch_size=8, micro_batch_size=4),
        nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)),
    )
    flops = Flops(1000.0)
    with flops.counting(plan, Sharing(0, 2), 0):  # one of two micro batches is this rank's
        model(torch.ones(4, 3)).sum().backward()
    # the first layer's inputs need no gradient
    assert flops.utilisation(10.0) == pytest.approx(10 * (4 * 3 * 5 + 6 * 5 * 2) / 1000)


@pytest.mark.parametrize(
    ("name", "precision", "found"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12), ("NVIDIA H100 PCIe", "tf32", 378e12), ("NVIDIA L4", "fp32", 30.3e12),
        ("NVIDIA L40S", "bf16", 362e12), ("NVIDIA A100-SXM4-80GB", "fp64", 0), ("Tesla K80", "fp32", 0),
    ],
)  # fmt: skip
def test_the_peak_of_a_gpu_is_known_by_its_name(name: str, precision: str, found: float) -> None:
    assert peak(name, precision) == pytest.approx(found)

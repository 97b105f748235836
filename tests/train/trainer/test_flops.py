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
        ("NVIDIA H100 NVL", "bf16", 835e12), ("NVIDIA H200", "bf16", 989e12), ("NVIDIA H20", "bf16", 148e12),
        ("NVIDIA H800", "bf16", 989e12), ("NVIDIA H800 PCIe", "bf16", 756e12),
        ("NVIDIA A800-SXM4-80GB", "fp16", 312e12),
        ("NVIDIA A800 80GB PCIe", "fp32", 19.5e12), ("NVIDIA A100-PCIE-40GB", "tf32", 156e12),
        ("NVIDIA A10", "bf16", 125e12), ("NVIDIA A40", "bf16", 149.7e12), ("NVIDIA L20", "tf32", 59.8e12),
        ("NVIDIA L40", "bf16", 181e12), ("NVIDIA L40S", "bf16", 362e12), ("NVIDIA GeForce RTX 3090", "bf16", 71e12),
        ("NVIDIA GeForce RTX 4090", "bf16", 165e12), ("NVIDIA GeForce RTX 4090 D", "bf16", 147e12),
    ],
)  # fmt: skip
def test_the_peak_of_a_gpu_is_known_by_its_name(name: str, precision: str, found: float) -> None:
    assert peak(name, precision) == pytest.approx(found)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A10G", "NVIDIA A100X", "NVIDIA L2", "NVIDIA L40G", "NVIDIA H20-3e", "NVIDIA H200 NVL",
        "NVIDIA H800 NVL",
        "NVIDIA GH200 480GB", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA RTX A4000",
        "NVIDIA GeForce RTX 4090D", "Tesla K80", "",
    ],
)  # fmt: skip
def test_a_card_with_a_similar_name_has_no_peak(name: str) -> None:
    assert peak(name, "bf16") == 0


def test_a_precision_without_a_peak_has_none() -> None:
    assert peak("NVIDIA A100-SXM4-80GB", "fp64") == 0

"""DDP's buckets are laid out before the first step, and nothing else of a model notices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.train.sessions.ranks import ranks
from train.errors import Refused
from train.parallel.torch_private import has_rebuilt_buckets
from train.sessions.buckets import lay_out

pytestmark = pytest.mark.never_forgiven


def _model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


def _lay_out(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    calls: list[str] = []
    plain = DDP(torch.compile(_model(), backend="eager"))
    for module in plain.modules():
        module.register_forward_pre_hook(lambda module, _: calls.append(type(module).__name__))
    before, inner = {name: one.clone() for name, one in plain.state_dict().items()}, plain.module
    torch.manual_seed(7)
    found["lines"] = lay_out(nn.ModuleDict({"inside": plain}))
    found["drawn"] = torch.rand(()).item()
    after = plain.state_dict()
    found["same"] = plain.module is inner and list(before) == list(after)
    found["same"] &= all(torch.equal(before[name], after[name]) for name in before)
    found["gradients"] = [one for one in plain.parameters() if one.grad is not None]
    found["rebuilt"], found["calls"] = has_rebuilt_buckets(plain), calls
    for name, options in {"static": {"static_graph": True}, "unused": {"find_unused_parameters": True}}.items():
        found[name] = lay_out(DDP(_model(), **options))
    found["sparse"] = lay_out(DDP(nn.Embedding(5, 3, sparse=True)))
    hooked = DDP(_model())
    optimizer = torch.optim.SGD(hooked.parameters(), lr=0.1, weight_decay=0.1)
    next(hooked.parameters()).register_post_accumulate_grad_hook(lambda _: optimizer.step())
    try:
        lay_out(hooked)
    except Refused as refused:
        found["hooked"] = str(refused)
    return found


def test_two_passes_of_zeros_lay_out_the_buckets_and_leave_no_trace() -> None:
    torch.manual_seed(7)
    drawn = torch.rand(()).item()
    for found in ranks(3, _lay_out):
        assert isinstance(found, dict), found
        assert found["lines"] == found["unused"] == found["calls"] == found["gradients"] == []
        assert found["rebuilt"] and found["same"] and found["drawn"] == drawn
        assert "static_graph" in found["static"][0] and "sparse" in found["sparse"][0]
        assert "weights change in a backward" in found["hooked"]

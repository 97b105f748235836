"""How a model comes to its device unit by unit."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fully_shard
from torch.distributed.tensor import DTensor

from train.checkpoint.state_dict import weights_of, weights_sha256
from train.config import Config, Parallel
from train.parallel.fsdp import FSDP
from train.parallel.precision import Precision
from train.parallel.world import World

pytestmark = pytest.mark.never_forgiven

WHERE = torch.device("cpu")


class Centred(nn.Module):
    """No parameters: buffers alone, one of them not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.arange(4.0))
        self.register_buffer("cache", torch.ones(3), persistent=False)

    def forward(self, points: Tensor) -> Tensor:
        return points - self.get_buffer("centre")


class Model(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(Centred(), nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4), nn.LayerNorm(4))
        self[3].weight.requires_grad_(False)

    def _apply(self, *given: Any, **more: Any) -> Any:
        raise AssertionError("the whole model was moved at once")


def _place(folder: Path) -> None:
    dist.init_process_group("gloo", f"file://{folder}/meet", world_size=1, rank=0)
    moved: list[Tensor] = []
    where = next(module for module in (_fully_shard, _fsdp_init) if hasattr(module, "_move_states_to_device"))
    real = where._move_states_to_device

    def move(parameters: list[nn.Parameter], buffers: list[Tensor], device: torch.device) -> None:
        moved.extend([*parameters, *buffers])
        real(parameters, buffers, device)

    mock.patch.object(where, "_move_states_to_device", move).start()
    digest = weights_sha256(weights_of(Model()))
    model = Model()
    whole = [*model.parameters(), *model.buffers()]
    config = Config(parallel=Parallel(strategy="fsdp", wrap="Linear"))
    sharded = FSDP(World(0, 1, 0, WHERE), config, Precision("fp32", WHERE))
    sharded._find_divisor = lambda *_: 1.0  # type: ignore[method-assign] # its probes are no part of the model
    sharded.place(model)
    assert all(any(each is tensor for each in moved) for tensor in whole), "something was left where it was"
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert weights_sha256(weights_of(model)) == digest
    (folder / "done").touch()
    os._exit(0)


def test_the_whole_model_is_never_on_one_device_and_nothing_of_it_is_left_behind(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_place, args=(tmp_path,))
    process.start()
    process.join(240)
    assert (tmp_path / "done").exists()

"""Rank 0's state reaches other machines with the same bits, and into the memory where it stays."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.train.watch import Watch
from train.checkpoint.extra import Extra
from train.checkpoint.serialize import broadcast_state
from train.checkpoint.state_dict import TrainState
from train.parallel.precision import Precision
from train.parallel.world import World

pytestmark = pytest.mark.never_forgiven

CPU = torch.device("cpu")


class Counts(nn.Module):
    """Buffers of other types, one of them without a value, and a weight that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(3, 5).t())
        self.register_buffer("none", torch.empty(0))
        self.register_buffer("count", torch.randint(100, ()))
        self.register_buffer("mask", torch.randn(7) > 0)


def _state(seed: int, steps: int) -> TrainState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.Linear(500, 500), Counts())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    averages = {name: torch.randn_like(one) for name, one in model.named_parameters()}
    return TrainState(module=model, optimizer=optimizer, precision=Precision("fp32", CPU), extra=Extra(averages))


def _plain(state: TrainState) -> list[Any]:
    tree = {"model": state.module.state_dict(), "optimizer": state.optimizer.state_dict(), "extra": state.extra.state()}
    return [tree["model"], tree["optimizer"], tree["extra"]]


def _receive(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)  # a fork has none of the threads of OpenMP, and would wait for them
    dist.init_process_group("gloo", f"file://{folder}/meet", world_size=3, rank=rank)
    state = _state(rank, 2 if rank == 0 else 0)
    before = {name: one.data_ptr() for name, one in state.module.state_dict().items()}
    size = sum(one.nbytes for one in state.module.parameters())
    with Watch() as watch:
        broadcast_state(World(rank, size=3, local_rank=rank, device=CPU, nodes=3), state)
    if rank:
        assert {name: one.data_ptr() for name, one in state.module.state_dict().items()} == before
        assert watch.total < 2.2 * size, f"{watch.total} bytes; the moments are {2 * size}"
    torch.testing.assert_close(_plain(state), _plain(_state(0, 2)), rtol=0, atol=0)
    (folder / f"done{rank}").touch()
    dist.barrier()
    os._exit(0)


def test_each_tensor_is_received_where_it_stays(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_receive, args=(rank, tmp_path)) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    assert len(list(tmp_path.glob("done*"))) == 3

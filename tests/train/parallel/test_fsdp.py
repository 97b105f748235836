"""How a model comes to its device unit by unit, and in which types its units are gathered."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fully_shard
from torch.distributed.tensor import DTensor

from tests.train.watch import Watch
from train.checkpoint.state_dict import weights_of, weights_sha256
from train.config import Config, Parallel
from train.parallel.fsdp import FSDP
from train.parallel.precision import Precision
from train.parallel.world import World
from train.parallel.wrap_units import recompute

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
    torch.set_num_threads(1)  # a fork has none of the threads of OpenMP, and would wait for them
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
    sharded = FSDP(World(0, size=1, local_rank=0, device=WHERE), config, Precision("fp32", WHERE))
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


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)
        self.statistics = nn.BatchNorm1d(2 * width)

    def forward(self, points: Tensor) -> Tensor:
        return points + self.outer(torch.relu(self.statistics(self.inner(self.norm(points)))))


BLOCKS, WIDTH = 6, 128


def _mixed(rank: int, folder: Path, name: str, recomputes: bool) -> None:
    dist.init_process_group("gloo", f"file://{folder}/meet", world_size=4 if name == "hsdp" else 2, rank=rank)
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = nn.Sequential(*(Block(WIDTH) for _ in range(BLOCKS)))
    if recomputes:
        for block in model:  # those with statistics cannot be
            block.statistics = nn.Identity()
        recompute(model, "Block")
    shares = 2 if name == "hsdp" else None
    config = Config(parallel=Parallel(strategy=name, wrap="Block", shard_size=shares))  # type: ignore[arg-type]
    strategy = FSDP(
        World(rank, size=dist.get_world_size(), local_rank=rank, device=WHERE), config, Precision("bf16", WHERE)
    )
    strategy.place(model)
    points, watch = torch.randn(2, WIDTH), Watch()
    whole = 2 * sum(one.numel() for one in model.parameters())
    until = time.monotonic() + 20
    with strategy.micro_batch(0, True):
        with watch, strategy.precision.autocast():
            loss = strategy.compute(lambda one: one(points).square().mean())
            # a thread of gloo lets go of the last gathered unit a moment later
            while (held := watch.alive()) >= whole / 10 and time.monotonic() < until:
                time.sleep(0.01)
        with watch:
            strategy.backward(loss, 1.0, None)
    assert loss.dtype == torch.float32
    assert held < whole / 10, f"{held} bytes are alive after the forward of a model of {whole}"
    expected = {("_allgather_base_", torch.bfloat16), ("_reduce_scatter_base_", torch.float32)}
    if not recomputes:
        expected |= {("_allgather_base_", torch.float32)}  # of the norms with statistics
    if name == "hsdp":
        expected |= {("allreduce_", torch.float32)}
    assert watch.sent == expected
    assert {(one.dtype, one.grad.dtype) for one in model.parameters() if one.grad is not None} == {2 * (torch.float32,)}
    (folder / f"done{rank}").touch()
    os._exit(0)


@pytest.mark.parametrize(("name", "ranks", "recomputes"), [("fsdp", 2, False), ("fsdp", 2, True), ("hsdp", 4, False)])
def test_with_bf16_weights_travel_in_16_bits_and_no_unit_stays_on_a_rank_after_the_forward(
    name: str, ranks: int, recomputes: bool, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_mixed, args=(rank, tmp_path, name, recomputes)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    assert len(list(tmp_path.glob("done*"))) == ranks

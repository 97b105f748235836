"""The end of a run whose weights are spread: no rank leaves while another still gathers from it."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from train.config import Config, Parallel
from train.parallel.world import World
from train.trainer import conclude

pytestmark = pytest.mark.never_forgiven


def _end(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)  # a fork has none of the threads of OpenMP, and would wait for them
    limit = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", f"file://{folder}/meet", limit, world_size=2, rank=rank)
    model = nn.Linear(4, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    real = conclude.weights_sha256

    def slow(*given: Any) -> str:
        found = real(*given)
        if rank == 0:  # as a first rank that is still hashing the last tensor
            time.sleep(1)
            (folder / "hashed").touch()
        return found

    mock.patch.object(conclude, "weights_sha256", slow).start()
    job: Any = SimpleNamespace(
        strategy=SimpleNamespace(module=model), world=World(rank, size=2, local_rank=rank, device=torch.device("cpu")),
        optimizer=None, config=Config(parallel=Parallel(strategy="fsdp")), snapshots=SimpleNamespace(hold=lambda: None),
    )  # fmt: skip
    digest = conclude.digest(job)
    (folder / f"{rank}").write_text(f"{len(digest)} {(folder / 'hashed').exists()}")
    os._exit(0)


def test_a_rank_stays_until_the_first_one_has_all_weights(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_end, args=(rank, tmp_path)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(240)
    assert [(tmp_path / f"{rank}").read_text() for rank in range(2)] == ["64 True", "0 True"]

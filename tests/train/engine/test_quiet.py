"""A task that communicates where a rank has no data is refused in a line, before it waits for ever."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from tests.train.tiers import later
from train.data.plan import Plan
from train.engine import uneven
from train.engine.quiet import quiet
from train.errors import TrainingFailed

if TYPE_CHECKING:
    from conftest import Station

TASK = """
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

def model(config):
    return nn.Linear(4, 1)

def datasets(config):
    return TensorDataset(torch.ones({samples}, 4)), TensorDataset(torch.ones(20, 4))

def gather():
    if dist.is_initialized():
        dist.all_gather([torch.zeros(64) for _ in range(dist.get_world_size())], torch.zeros(64))

calls = []

def loss(model, batch):
    calls.append(1)
    if {when}:
        gather()
    return model(batch[0]).square().mean()

def metrics(model, batch):
    if {metric}:
        gather()
    return {{"one": torch.ones(())}}
"""
QUICK = ["--spawn", 3, "--batch_size", 12, "--epochs", 2, "--log.tensorboard", "false"]


@pytest.mark.minutes
@pytest.mark.parametrize(
    ("when", "metric", "words"),
    [
        ("True", "False", "loss in * for ranks 1 and 2, without data in the last batch of an epoch"),
        *later(
            ("len(calls) == 2", "False", "loss in * for ranks 1 and 2, without data in step 2"),
            ("False", "True", "loss or metrics in * for ranks 2 and 2, without data in an evaluation"),
        ),
    ],
)
def test_a_collective_that_would_wait_for_ever_is_refused(station: Station, when: str, metric: str, words: str) -> None:
    (station.folder / "task.py").write_text(TASK.format(samples=16, when=when, metric=metric))
    done = station("run", "task.py", "--name", "c", *QUICK)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 3, done.stderr
    for part in words.replace("ranks 2 and 2", "rank 2").split(" * "):
        assert part in last, done.stderr
    assert "--data.drop_last true" in last and "communicates (allgather)" in last
    assert station.record("c")["state"] == "failed"


def _call_all(folder: Path) -> None:
    dist.init_process_group("gloo", f"file://{folder}/meet", world_size=1, rank=0)
    one, other = torch.ones(2), torch.ones(2)
    calls: list[Callable[[], object]] = [
        lambda: dist.all_reduce(one),
        lambda: dist.reduce(one, 0),
        lambda: dist.broadcast(one, 0),
        lambda: dist.all_gather([other], one),
        lambda: dist.all_gather_into_tensor(other, one),
        lambda: dist.all_gather_object([None], 1),
        lambda: dist.gather(one, [other]),
        lambda: dist.scatter(one, [other]),
        lambda: dist.reduce_scatter(one, [other]),
        lambda: dist.reduce_scatter_tensor(one, other),
        lambda: dist.all_to_all([one], [other]),
        lambda: dist.all_to_all_single(one, other),
        dist.barrier,
    ]
    for number, call in enumerate(calls):
        with pytest.raises(TrainingFailed, match="communicates"), quiet("loss", folder, "rank 1"):
            call()
        (folder / str(number)).touch()
    dist.all_reduce(one)  # afterwards they are what they were
    (folder / "done").touch()
    os._exit(0)


def test_every_collective_of_torch_is_refused(tmp_path: Path) -> None:
    """torch's functions end in other methods from release to release."""
    process = multiprocessing.get_context("fork").Process(target=_call_all, args=(tmp_path,))
    process.start()
    process.join(240)
    assert (tmp_path / "done").exists(), sorted(path.name for path in tmp_path.iterdir())


@pytest.mark.minutes
def test_a_collective_where_all_ranks_always_have_data_is_let_through(station: Station) -> None:
    (station.folder / "task.py").write_text(TASK.format(samples=24, when="torch.is_grad_enabled()", metric="False"))
    done = station.ok("run", "task.py", "--name", "c", *QUICK)
    assert "finished after 4 steps" in done.stderr


@pytest.mark.parametrize(
    ("length", "batch", "micro", "world"), [(20, 16, 8, 2), (100, 16, 4, 3), (7, 16, 4, 3), (48, 16, 4, 4)]
)
def test_ranks_without_data_are_those_that_the_plan_gives_none(length: int, batch: int, micro: int, world: int) -> None:
    plan = Plan(length, batch, micro)
    for step in range(3 * plan.steps_per_epoch):
        shares = [len(range(rank, plan.micro_batches(step), world)) for rank in range(world)]
        without = [rank for rank, share in enumerate(shares) if share < max(shares)]
        assert list(uneven.idle(plan.micro_batches(step), world)) == without
        place = uneven.LAST if (step + 1) % plan.steps_per_epoch == 0 else uneven.EVERY
        assert uneven.survey(plan, None, world).get(place, []) == without
        ahead = [bool(uneven.idle(plan.micro_batches(later), world)) for later in range(step, step + 5)]
        assert uneven.waits(plan, world, step, step + 5) == any(ahead) or plan.steps_per_epoch > 5

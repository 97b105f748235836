"""Generators of a task's own, wherever it keeps them, draw the same in a run that was killed as in another."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

from train.data.generators import owned, seed_owned

if TYPE_CHECKING:
    from conftest import Station

HELPER = """
import numpy as np

rng = np.random.RandomState(1)


def jitter():
    return float(rng.rand())
"""
TASK = """
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

import GENERATORS_HELPER

rng = np.random.default_rng(0)


def shaken(strength, draw=random.Random(0).random):
    own = torch.Generator()
    return lambda point: point + strength * torch.rand(point.shape, generator=own) + draw()


class Slim:
    __slots__ = ("rng",)

    def __init__(self):
        self.rng = np.random.default_rng(1)


class Points(Dataset):
    shared = np.random.default_rng(2)

    def __init__(self, count, late):
        self.points = torch.linspace(-1, 1, 4 * count).reshape(count, 4)
        self.transform, self.slim = shaken(0.1), Slim()
        self.late = None if late else self.slim.rng

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        if self.late is None:
            self.late = np.random.default_rng()
        noise = rng.random() + self.shared.random() + self.slim.rng.random() + self.late.random()
        return self.transform(self.points[index]) + 0.1 * noise + GENERATORS_HELPER.jitter(), index % 2


class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, points):
        return points * (torch.rand(points.shape, generator=self.generator) > 0.3)


class Langevin(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data += 0.01 * torch.randn_like(parameter) + 0.01 * rng.random()


def datasets(config):
    return Points(60, True), Points(20, False)


def model(config):
    return nn.Sequential(nn.Linear(4, 16), Noise(), nn.Tanh(), nn.Linear(16, 2))


def optimizer(model, config):
    return Langevin(model.parameters(), lr=0.1)


def loss(model, batch):
    if Path("kill-draws").exists() and list(Path(__file__).parent.glob("checkpoints/step-*")):
        Path("kill-draws").unlink(missing_ok=True)
        os.kill(int(os.environ["TRAIN_AGENT_PID"]), signal.SIGKILL)
        time.sleep(60)  # it takes its ranks with it
    return nn.functional.cross_entropy(model(batch[0] + rng.random()), batch[1])
"""
FLAGS = [
    "--batch_size", 16, "--micro_batch_size", 4, "--cpu_threads", 1, "--steps", 21, "--checkpoint.every_steps", 5,
    "--log.tensorboard", "false", "--log.every_steps", 1, "--eval.every_epochs", 1,
]  # fmt: skip


@pytest.fixture(scope="module")
def draws(shared_station: Station) -> Station:
    (shared_station.folder / "generators_helper.py").write_text(HELPER)
    (shared_station.folder / "draws.py").write_text(TASK.replace("GENERATORS_HELPER", "generators_helper"))
    return shared_station


@pytest.fixture(scope="module")
def undisturbed(draws: Station) -> dict[str, Any]:
    draws.ok("launch", "draws.py", "--name", "draws", *FLAGS, "--nproc", 2, "--data.workers", 0, "--follow")
    return draws.record("draws")


@pytest.mark.parametrize(("workers", "ranks"), [(0, 2), (2, 2)])
def test_a_killed_run_that_draws_from_generators_of_its_own_ends_as_if_nothing_had_happened(
    workers: int, ranks: int, draws: Station, undisturbed: dict[str, Any]
) -> None:
    name = f"draws-killed-{workers}"
    (draws.folder / "kill-draws").touch()
    draws.ok("launch", "draws.py", "--name", name, *FLAGS, "--nproc", ranks, "--data.workers", workers)
    assert draws.wait_for_end(name)["state"] == "interrupted", draws.logs(name)
    draws.ok("resume", name, "--follow")
    record = draws.record(name)
    assert record["metrics"] == undisturbed["metrics"]
    assert record["weights_sha256"] == undisturbed["weights_sha256"]


def test_another_number_of_ranks_draws_the_same(draws: Station, undisturbed: dict[str, Any]) -> None:
    draws.ok("run", "draws.py", "--name", "draws-alone", *FLAGS, "--data.workers", 0)
    losses = [[line["loss"] for line in draws.metrics(name) if "loss" in line] for name in ("draws", "draws-alone")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


LATE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Net(nn.Linear):
    def forward(self, points):
        if not hasattr(self, "generator"):
            self.generator = torch.Generator()
        return super().forward(points + torch.rand(points.shape, generator=self.generator))


def datasets(config):
    return TensorDataset(torch.rand(32, 4)), None


def model(config):
    return Net(4, 1)


def loss(model, batch):
    return model(batch[0]).square().mean()
"""


def test_a_generator_that_a_forward_makes_is_named(station: Station) -> None:
    (station.folder / "late.py").write_text(LATE)
    done = station.ok("run", "late.py", "--name", "late-generator", "--steps", 2, "--batch_size", 16)
    assert "the first step has made a random generator" in done.stderr


class Touchy:
    """Whatever is asked of it, it raises."""

    def __init__(self) -> None:
        self.own = random.Random(0)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("eq")

    def __hash__(self) -> int:
        raise RuntimeError("hash")

    def __len__(self) -> int:
        raise RuntimeError("len")


def deep(depth: int) -> Any:
    return [deep(depth - 1)] if depth else np.random.default_rng(0)


def test_generators_are_found_in_whatever_an_object_holds_and_each_is_seeded() -> None:
    blocks = [nn.Linear(2, 2) for _ in range(2000)]
    last = nn.Identity()
    last.generator = torch.Generator()  # type: ignore[assignment]
    method = np.random.default_rng(0).random
    for holder, count in (
        (Touchy(), 1),
        (deep(60), 1),
        (functools.partial(lambda draw: draw(), method), 1),
        (nn.Sequential(*blocks, last), 1),
        ([[object() for _ in range(60)] for _ in range(60)], 0),
        (random.shuffle, 0),  # of Python's own generator, which is seeded anyway
        (np.random.rand, 0),
        (Path("x"), 0),
    ):
        found = owned(holder)
        assert len(found) == count, holder
        seed_owned(found, 3)
    seed_owned(owned(method), 5)
    first = method()
    seed_owned(owned(method), 5)
    assert method() == first


def test_what_a_task_draws_from_torch_costs_it_no_generator() -> None:
    assert owned(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), nn.functional.cross_entropy) == []


@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.PCG64, np.random.Philox, np.random.SFC64])
def test_a_random_state_of_any_kind_is_seeded_with_what_it_keeps_for_the_next_draw(kind: Any) -> None:
    one = np.random.RandomState(kind(0))
    found = owned([one])
    drawn = []
    for _ in range(2):
        one.standard_normal()  # makes two, and keeps one of them
        seed_owned(found, 3)
        drawn.append(one.standard_normal(3).tolist())
    assert drawn[0] == drawn[1]


class OnDevice(torch.Generator):
    """As one on a GPU is in a process that was forked after another had opened it."""

    device = torch.device("cuda", 0)  # type: ignore[assignment]

    def manual_seed(self, seed: int) -> torch.Generator:
        if get_worker_info() is not None:
            raise RuntimeError("CUDA error: initialization error")
        return super().manual_seed(seed)


class Mixed(Dataset[float]):
    def __init__(self) -> None:
        self.on_device, self.rng = OnDevice(), np.random.default_rng(1)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> float:
        seed_owned(owned(self), 3)
        return float(self.rng.random())


def test_loader_processes_leave_the_generators_of_a_device_alone() -> None:
    of_worker = next(iter(DataLoader(Mixed(), num_workers=1, multiprocessing_context="fork", batch_size=None)))
    assert of_worker == Mixed()[0]
    one = OnDevice()
    seed_owned(owned([one]), 3)
    assert one.initial_seed() != OnDevice().initial_seed()

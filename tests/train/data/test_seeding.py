"""Generators of a task's own draw the same in a run that was killed as in another."""

from __future__ import annotations

import functools
import random
import sys
import types
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, get_worker_info
from torchvision.transforms import Compose

from train.data.fetch import gatherer
from train.data.order import seed_of
from train.data.plan import MicroBatch
from train.data.seeding import owned, seed_owned

pytestmark = pytest.mark.never_forgiven

if TYPE_CHECKING:
    from conftest import Station

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

rng = np.random.default_rng(0)


class Shaken:
    def __init__(self, strength):
        self.strength, self.draw, self.own = strength, random.Random(0), torch.Generator()

    def __call__(self, point):
        return point + self.strength * torch.rand(point.shape, generator=self.own) + self.draw.random()


class Slots:
    __slots__ = ("own",)

    def __init__(self):
        self.own = random.Random(0)

    def __call__(self):
        return self.own.random()


def closure():
    own = np.random.default_rng(3)
    return lambda: own.random()


def stream():
    own = np.random.RandomState(4)
    while True:
        yield own.rand()


class Points(Dataset):
    shared = np.random.default_rng(2)

    def __init__(self, count, late):
        self.points = torch.linspace(-1, 1, 4 * count).reshape(count, 4)
        self.transforms = [Shaken(0.1), Shaken(0.2)]
        self.hidden = {"slots": Slots(), "closure": closure(), "stream": stream().__next__}
        self.late = None if late else self.transforms[0].draw

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        if self.late is None:
            self.late = np.random.default_rng()
        noise = sum(draw() for draw in self.hidden.values())
        noise += rng.random() + self.shared.random() + self.late.random()
        return self.transforms[1](self.transforms[0](self.points[index])) + 0.1 * noise, index % 2


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
    if Path("kill-draws").exists() and list(Path(__spec__.origin).parent.glob("checkpoints/step-*")):
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
    (shared_station.folder / "draws.py").write_text(TASK)
    return shared_station


@pytest.fixture(scope="module")
def undisturbed(draws: Station) -> dict[str, Any]:
    draws.ok("launch", "draws.py", "--name", "draws", *FLAGS, "--nproc", 2, "--data.workers", 0, "--follow")
    return draws.record("draws")


def test_a_killed_run_that_draws_from_generators_of_its_own_ends_as_if_nothing_had_happened(
    draws: Station, undisturbed: dict[str, Any]
) -> None:
    (draws.folder / "kill-draws").touch()
    draws.ok("launch", "draws.py", "--name", "draws-killed", *FLAGS, "--nproc", 2, "--data.workers", 2)
    assert draws.wait_for_end("draws-killed")["state"] == "interrupted", draws.logs("draws-killed")
    draws.ok("resume", "draws-killed", "--follow")
    record = draws.record("draws-killed")
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
    assert "has made a random generator in the first step" in done.stderr


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


class Noise:
    def __init__(self, own: Any) -> None:
        self.own = own


class Transformed(Dataset[Any]):
    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 10


class Base(Dataset[Any]):
    drawn = random.Random(0)
    """Inherited."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.transform(float(index)) + self.drawn.random()


class Derived(Base):
    """Its class stands in another file than the task."""


OTHER_FILE = """
import numpy as np
rng = np.random.default_rng(0)
def augment(value):
    return value + rng.random()
def datasets(config):
    return None
"""


def test_what_a_task_file_and_a_base_class_draw_from_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    task = types.ModuleType("the_task")
    monkeypatch.setitem(sys.modules, "the_task", task)
    exec(OTHER_FILE, vars(task))
    micro = MicroBatch(step=0, number=0, indices=np.arange(4), seed=7)
    batches = [gatherer(Derived(task.augment), None, skip=False, made_by=task.datasets)(micro)[0] for _ in range(2)]
    assert torch.equal(*batches)


def test_generators_are_found_as_attributes_of_what_a_task_makes_and_each_is_seeded() -> None:
    module = nn.Identity()
    module.generator = torch.Generator()  # type: ignore[assignment]
    noise = Compose([Noise(np.random.RandomState(0)), Noise(random.Random(0))])
    for holder, count in (
        (Touchy(), 1),
        (nn.Sequential(*[nn.Linear(2, 2) for _ in range(2000)], nn.Sequential(module)), 1),
        (ConcatDataset([Subset(Transformed(noise), [1]), Transformed(None)]), 2),
        (Transformed([np.random.default_rng(number) for number in range(65)]), 0),  # one a sample
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), 0),
        (nn.functional.cross_entropy, 0),
        (random.shuffle, 0),  # of Python's own generator, which is seeded anyway
    ):
        found = owned(holder)
        assert len(found) == count, holder
        seed_owned(found, 3)


def _default(own: Any = np.random.default_rng(1)) -> Any:  # noqa: B008
    return own.random()


class _Slots:
    __slots__ = ("never", "own")

    def __init__(self) -> None:
        self.own = random.Random(0)


def _stream() -> Iterator[float]:
    own = np.random.default_rng(2)
    while True:
        yield own.random()


def _closure() -> Any:
    own = random.Random(3)
    return lambda: [own.random() for _ in range(2)]


def _of_a_file(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = types.ModuleType("the_noise")
    monkeypatch.setitem(sys.modules, "the_noise", module)
    exec(
        "import random\nown, other = random.Random(1), random.Random(2)\ndef draw():\n  return own.random()",
        vars(module),
    )
    return module.draw


def test_a_generator_is_found_however_it_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = _stream()
    next(begun)
    partial = functools.partial(torch.rand, generator=torch.Generator())
    bits, array = np.random.PCG64(1), np.array([random.Random(1), None], dtype=object)
    held = [
        _Slots(), _closure(), _default, begun, _of_a_file(monkeypatch), partial, random.Random(1).gauss, bits, array,
        np.random.default_rng(5).normal, random.Random(1).random, deque([[random.Random(7)]]),
        [(str(number), number) for number in range(5000)],  # samples
        random.gauss, np.random.rand, np.random.mtrand._rand, torch.default_generator, nn.functional.dropout,
    ]  # fmt: skip
    counts = [len(owned(Noise({"deep": [{"deeper": one}]}))) for one in held]
    assert counts == [1] * 12 + [0] * 6
    together = owned(Noise(held), Noise({"first": _Slots()}))
    assert len({seed.key for seed in together}) == 13


def test_what_is_found_in_attributes_keeps_its_number_whatever_is_hidden_beside_it() -> None:
    near, hidden = np.random.default_rng(0), _Slots()
    seed_owned(owned(Noise([hidden, near])), 3)
    drawn = (near.random(), hidden.own.random())
    assert drawn[0] == np.random.default_rng(seed_of(3, "own", 0)).random()
    seed_owned(owned(Noise([hidden, near])), 3)
    assert drawn == (near.random(), hidden.own.random())


@pytest.mark.parametrize("make", [np.random.RandomState, np.random.default_rng, random.Random])
def test_a_generator_is_seeded_with_what_it_keeps_for_the_next_draw(make: Any) -> None:
    one = make(0)
    draw = one.gauss if isinstance(one, random.Random) else one.standard_normal
    arguments = (0, 1) if isinstance(one, random.Random) else ()
    drawn = []
    for _ in range(2):
        draw(*arguments)  # makes two, and may keep one of them
        seed_owned(owned(one), 3)
        drawn.append([draw(*arguments) for _ in range(3)])
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

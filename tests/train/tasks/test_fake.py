"""Made-up images: a function of their index, as many and as large as asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from train.launcher.checks import prepare
from train.launcher.request import Request, resolve
from train.tasks import fake

if TYPE_CHECKING:
    from conftest import Station


def test_an_image_depends_on_its_index_alone() -> None:
    one, again = fake.Noise(10, 8, 3, 0), fake.Noise(99, 8, 3, 0)
    torch.manual_seed(5)
    assert torch.equal(one[4][0], again[4][0]) and one[4][1] == again[4][1] == 1
    assert not torch.equal(one[4][0], one[5][0])


def test_reading_an_image_leaves_the_generator_of_the_process_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    fake.Noise(10, 8, 3, 0)[0]
    assert torch.equal(torch.rand(1), expected)


def test_settings_are_size_classes_and_count() -> None:
    task, config = resolve(Request(task="fake", flags={"task.size": "9", "task.classes": "4", "task.count": "80"}))
    train, evaluation = task.datasets(config)
    assert (len(train), len(evaluation)) == (80, 10)
    assert train[0][0].shape == (3, 9, 9)
    assert {train[index][1] for index in range(80)} == {0, 1, 2, 3}
    assert not torch.equal(train[0][0], evaluation[0][0])
    assert task.model(config)[-1].out_features == 4


def test_any_model_of_torchvision_can_be_tried() -> None:
    prepared = prepare(Request(task="fake", flags={"task.model": "squeezenet1_0", "task.size": "64"}))
    assert prepared.record["samples"] == 2048


def test_a_machine_is_tried_without_data(shared_station: Station) -> None:
    shared_station.ok(
        "run", "fake", "--name", "f", "--task.count", 256, "--task.classes", 3, "--task.size", 8, "--batch_size", 32,
        "--epochs", 4, "--optim.lr", 0.01,
    )  # fmt: skip
    lines = [line for line in shared_station.metrics("f") if "loss" in line]
    assert shared_station.record("f")["metrics"]["accuracy"] > 0.5
    assert lines[-1]["loss"] < 1.0

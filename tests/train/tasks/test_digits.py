"""The digits: real scans, learned well, the same split for everybody."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sklearn.datasets import load_digits

from train.data.seeding import seed_host
from train.launcher.request import Request, resolve

if TYPE_CHECKING:
    from conftest import Station


def made(**flags: str) -> tuple[Any, Any, Any]:
    task, config = resolve(Request(task="digits", flags=flags))
    return task, config, task.datasets(config)


def test_the_scans_are_scikit_learns_each_in_one_of_the_two_sets() -> None:
    _, _, (train, evaluation) = made(**{"task.shift": "0"})
    assert (len(train), len(evaluation)) == (1437, 360)
    ours = sorted(
        (tuple((16 * image).int().flatten().tolist()), int(digit))
        for part in (train, evaluation)
        for image, digit in (part[index] for index in range(len(part)))
    )
    theirs = load_digits()
    expected = sorted((tuple(map(int, row)), int(digit)) for row, digit in zip(theirs.data, theirs.target, strict=True))
    assert ours == expected


def test_the_split_is_the_same_for_every_seed() -> None:
    first, second = made(seed="1")[2], made(seed="2")[2]
    assert torch.equal(first[1].images, second[1].images) and torch.equal(first[0].digits, second[0].digits)


def test_augmentation_moves_training_scans_only_and_follows_the_seed() -> None:
    _, _, (train, evaluation) = made(**{"task.shift": "2"})
    assert torch.equal(evaluation[0][0], evaluation.images[0])

    def views(seed: int) -> torch.Tensor:
        seed_host(seed)
        return torch.stack([image for image, _ in train.__getitems__([0] * 50)])

    assert torch.equal(views(1), views(1)) and not torch.equal(views(1), views(2))
    assert len({tuple(view.flatten().tolist()) for view in views(1)}) > 5
    inner = train.images[0, :, 3:5, 3:5]  # whatever the move, what lies 3 from the edge is still in the picture
    assert all((view.unfold(1, 2, 1).unfold(2, 2, 1) == inner[:, None, None]).all((-1, -2)).any() for view in views(3))


def test_two_epochs_learn_most_of_it_and_every_test_scan_is_counted(finished: Station) -> None:
    evaluations = [line for line in finished.metrics("done") if "eval" in line]
    assert [line["epoch"] for line in evaluations] == [1, 2]
    assert {line["samples"] for line in evaluations} == {360}
    accuracy = finished.record("done")["metrics"]["accuracy"]
    assert accuracy > 0.8
    assert abs(accuracy * 360 - round(accuracy * 360)) < 1e-9, "a share of 360 scans"


def test_every_scan_is_consumed_once_an_epoch(finished: Station) -> None:
    samples = finished.samples("done")
    for first in (1, 24):
        epoch = [index for step in range(first, first + 23) for index in samples[step]]
        assert sorted(epoch) == list(range(1437))

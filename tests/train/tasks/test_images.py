"""Image classification: class folders of JPEG and PNG files, torchvision's data sets and models."""

from __future__ import annotations

import gzip
import pickle
import random
import shutil
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.train.specs import with_spec
from train.build.objects import make_model
from train.errors import Refused
from train.launcher.checks import prepare
from train.launcher.request import Request, resolve
from train.tasks import images
from train.trainer.export import export

if TYPE_CHECKING:
    from conftest import Station

COLOURS = {"blue": (20, 30, 220), "green": (20, 220, 30), "red": (220, 30, 20)}
SMALL = {"task.model": "small", "task.size": "16"}


def paint(folder: Path, counts: dict[str, int]) -> Path:
    """Class folders in which a picture's colour is its class; JPEG, PNG, grey, transparent and palette files."""
    random = np.random.default_rng(0)
    for part, count in counts.items():
        for name, colour in COLOURS.items():
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                noise = random.integers(-20, 20, (20 + number, 24, 3))
                picture = Image.fromarray(np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8))
                if number % 4 == 2:
                    picture = picture.convert("RGBA")
                elif number % 4 == 3:
                    picture = picture.convert("P")
                suffix = "jpg" if number % 4 == 0 else "png"
                picture.save(folder / part / name / f"{number}.{suffix}")
    return folder


def mnist(root: Path) -> None:
    """MNIST's own file format, 40 and 20 pictures of 4 classes: a picture is as bright as its class."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", 40), ("t10k", 20)):
        labels = np.arange(count, dtype=np.uint8) % 4
        pictures = np.repeat(60 * labels, 28 * 28).astype(np.uint8)
        head = struct.pack(">BBBBIII", 0, 0, 8, 3, count, 28, 28)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(head + pictures.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">BBBBI", 0, 0, 8, 1, count) + labels.tobytes())
        with gzip.open(raw / f"{part}-labels-idx1-ubyte.gz", "wb") as file:
            file.write(b"not read")


def cifar10(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CIFAR-10's own file format with ten pictures a file. The real files' check sums cannot be made up."""
    from torchvision.datasets import CIFAR10

    folder = root / CIFAR10.base_folder
    folder.mkdir(parents=True)
    for name, _ in [*CIFAR10.train_list, *CIFAR10.test_list]:
        entry = {"data": np.full((10, 3072), 7, dtype=np.uint8), "labels": list(range(10))}
        (folder / name).write_bytes(pickle.dumps(entry))
    classes = [f"class {index}" for index in range(10)]
    (folder / CIFAR10.meta["filename"]).write_bytes(pickle.dumps({"label_names": classes}))
    monkeypatch.setattr(CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5=None: Path(path).exists())


def datasets(**flags: str) -> tuple[Any, Any]:
    task, config = resolve(Request(task="images", flags=SMALL | {k.replace("__", "."): v for k, v in flags.items()}))
    return task.datasets(config)


@pytest.fixture(autouse=True)
def fresh() -> None:
    images._number_of_classes.cache_clear()


def test_class_folders_are_learned_by_two_ranks_with_workers(shared_station: Station) -> None:
    root = paint(shared_station.folder / "pictures", {"train": 8, "val": 3})
    shared_station.ok(
        "run", "images", "--name", "painted", "--data.root", root, "--spawn", 2, "--data.workers", 1, "--task.model",
        "small", "--task.size", 16, "--task.augment", "trivial", "--batch_size", 10, "--epochs", 6, "--optim.lr", 0.5,
        "--schedule.scaling", "none", "--schedule.warmup_epochs", 0, "--eval.every_epochs", 0,
    )  # fmt: skip
    record = shared_station.record("painted")
    assert record["samples"] == 24 and record["total_steps"] == 18
    assert record["metrics"]["top5"] == 1.0
    # three classes: a third is guessing
    assert record["metrics"]["accuracy"] > 0.6


def test_an_exported_model_takes_normalised_pictures(shared_station: Station, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    export(*with_spec(shared_station.run("painted")), tmp_path / "x.onnx")
    (taken,) = onnx.load(tmp_path / "x.onnx").graph.input
    assert taken.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    assert [size.dim_value for size in taken.type.tensor_type.shape.dim][1:] == [3, 16, 16]


@pytest.mark.never_forgiven
def test_every_format_becomes_a_normalised_picture_of_the_wanted_size_and_the_order_of_classes_is_the_alphabet(
    tmp_path: Path,
) -> None:
    train, evaluation = datasets(data__root=str(paint(tmp_path, {"train": 4, "val": 4})), task__augment="none")
    for dataset in (train, evaluation):
        assert dataset.classes == ["blue", "green", "red"] and len(dataset) == 12
        for index in range(12):
            pictures, labels = images.on_device(images.collate([dataset[index]]))
            picture, label = pictures[0], int(labels)
            assert picture.shape == (3, 16, 16) and picture.dtype == torch.float32
            # undo the normalisation: the strongest channel is the class's colour
            plain = picture * torch.tensor(images.STD)[:, None, None] + torch.tensor(images.MEAN)[:, None, None]
            assert plain.mean((1, 2)).argmax() == {0: 2, 1: 1, 2: 0}[label]


@pytest.mark.parametrize("name", ["", "ImageFolder"])
def test_hidden_folders_are_no_classes_and_hold_no_pictures(tmp_path: Path, name: str) -> None:
    root = paint(tmp_path, {"train": 3, "val": 3})
    expected = [
        (path, label) for label, kind in enumerate(COLOURS) for path in sorted((root / "train" / kind).iterdir())
    ]
    for place in ("train/.git", "val/@eaDir", "train/blue/.ipynb_checkpoints", "train/red/@eaDir", "val/__MACOSX/red"):
        (root / place).mkdir(parents=True)
        shutil.copy(root / "train/red/0.jpg", root / place)
    (root / "train/.empty").mkdir()
    shutil.copy(root / "train/red/0.jpg", root / "train/green/.0.jpg")
    train, _ = datasets(data__root=str(root / "train" if name else root), data__name=name)
    assert train.classes == list(COLOURS)
    assert [(Path(path), label) for path, label in train.samples] == expected


@pytest.mark.parametrize("augment", ["flip", "crop", "trivial"])
def test_augmentation_varies_training_pictures_and_leaves_evaluation_alone(tmp_path: Path, augment: str) -> None:
    train, evaluation = datasets(data__root=str(paint(tmp_path, {"train": 1, "val": 1})), task__augment=augment)
    torch.manual_seed(0), random.seed(0)
    assert len({tuple(train[0][0].flatten().tolist()) for _ in range(20)}) > 1
    assert torch.equal(evaluation[0][0], evaluation[0][0])


def test_a_data_set_of_torchvision_on_disk_is_read_in_its_own_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mnist(tmp_path)
    train, evaluation = datasets(data__root=str(tmp_path), data__name="MNIST", task__augment="none")
    assert (len(train), len(evaluation)) == (40, 20)
    brightness = [float(train[index][0].float().mean()) for index in range(4)]
    assert brightness == sorted(brightness) and train[0][0].shape == (3, 16, 16)
    cifar10(tmp_path, monkeypatch)
    train, evaluation = datasets(data__root=str(tmp_path), data__name="CIFAR10")
    assert (len(train), len(evaluation)) == (50, 10)
    task, config = resolve(Request(task="images", flags={**SMALL, "data.root": str(tmp_path), "data.name": "CIFAR10"}))
    assert make_model(task, config)[-1].out_features == 10


def test_a_run_on_a_torchvision_data_set_knows_its_size(tmp_path: Path) -> None:
    mnist(tmp_path)
    prepared = prepare(
        Request(task="images", flags={**SMALL, "data.root": str(tmp_path), "data.name": "MNIST", "epochs": "2"})
    )
    assert prepared.record["samples"] == 40 and prepared.record["total_steps"] == 2


@pytest.mark.parametrize("name", ["resnet18", "googlenet"])
def test_torchvisions_models_come_with_the_wanted_number_of_classes_and_learn(name: str) -> None:
    size = 32 if name != "googlenet" else 64
    model = images.network(name, 3, size).train()
    batch = (torch.randn(2, 3, size, size), torch.tensor([0, 2]))
    images.loss(model, batch).backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    figures = images.metrics(model.eval(), batch)
    assert figures.keys() == {"loss", "accuracy", "top5"} and figures["top5"] == 1.0


def test_a_vision_transformer_is_made_for_the_size_of_the_pictures() -> None:
    with torch.device("meta"):  # shapes alone
        model = images.network("vit_b_32", 3, 64)
    assert (model.image_size, model.heads[-1].out_features) == (64, 3)
    with pytest.raises(Refused, match=r"--task\.size 65"), torch.device("meta"):
        images.network("vit_b_32", 3, 65)


def test_nothing_is_ever_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import urllib.request

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a download")

    monkeypatch.setattr(urllib.request, "urlopen", forbidden)
    (tmp_path / "something").mkdir()
    for name in ("MNIST", "CIFAR10", "FashionMNIST", "SVHN", "Flowers102", "Food101"):
        with pytest.raises(Refused, match=name):
            prepare(Request(task="images", flags={**SMALL, "data.root": str(tmp_path), "data.name": name}))
    assert [path.name for path in tmp_path.iterdir()] == ["something"]

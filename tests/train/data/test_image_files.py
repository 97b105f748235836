"""Image files are read as RGB of 8 bits; micro batches are the same whoever makes them; what is damaged is named."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import ImageFolder

from train.bench.input import paint
from train.data.crop import Crop, centre_crop, random_crop
from train.data.fetch import BadSample, fetcher
from train.data.image_files import (
    ImageFiles,
    ImageItems,
    Normalise,
    collate_images,
    read_image,
)
from train.data.loader import Loader
from train.data.plan import MicroBatch, Plan, Sharing, micro_batches_of
from train.errors import TrainingFailed

pytestmark = pytest.mark.never_forgiven

CPU = torch.device("cpu")
RAMP = np.linspace(0, 65535, 32 * 48).astype(np.uint16).reshape(32, 48)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eleven JPEG files, then a PNG and a grey one."""
    made = tmp_path_factory.mktemp("pictures")
    paint(made, 11, 120, 90)
    picture = Image.open(made / "train/0/00000.jpg")
    picture.save(made / "train/1/last.png")
    picture.convert("L").save(made / "train/1/grey.jpg")
    return made / "train"


def pictures(folder: Path, size: int = 32, **options: Any) -> ImageFiles:
    found = ImageFolder(str(folder))
    choose = functools.partial(random_crop, size=size)
    return ImageFiles(str(folder), samples=found.samples, classes=found.classes, size=size, choose=choose, **options)


def test_many_items_are_those_fetched_one_by_one_and_their_batch_is_no_copy(folder: Path) -> None:
    dataset = pictures(folder)
    random.seed(3)
    rows = dataset.__getitems__([4, 0, 12])
    random.seed(3)
    single = [dataset[index] for index in (4, 0, 12)]
    assert all(torch.equal(a, b) and x == y for (a, x), (b, y) in zip(rows, single, strict=True))
    batch, labels = collate_images(rows)
    assert isinstance(rows, ImageItems) and batch.dtype == torch.uint8 and batch.shape == (3, 3, 32, 32)
    assert batch.data_ptr() == rows[0][0].data_ptr() and batch[2].data_ptr() == rows[2][0].data_ptr()
    assert labels.tolist() == [dataset.targets[index] for index in (4, 0, 12)]
    assert all(torch.equal(a, b) for a, b in zip(collate_images(single), (batch, labels), strict=True))


def test_what_is_done_with_a_square_is_kept(folder: Path) -> None:
    random.seed(3)
    plain = pictures(folder)[2][0]
    random.seed(3)
    assert torch.equal(pictures(folder, augment=lambda square: 255 - square)[2][0], 255 - plain)


def fetched(folder: Path, world: int, workers: int, bad: list[BadSample] | None = None) -> dict[tuple[int, int], Any]:
    dataset, made = pictures(folder), {}
    plan = Plan(length=len(dataset), batch_size=8, micro_batch_size=3, seed=2)
    told = None if bad is None else bad.extend
    for rank in range(world):
        with Loader(
            dataset, {}, collate=collate_images, workers=workers, device=CPU, dtype=None, skipped=told
        ) as loader:
            for micro, batch in loader.batches(micro_batches_of(plan, Sharing(rank, world), first=0, last=4)):
                assert workers == 0 or batch[0].is_shared()
                made[micro.step, micro.number] = [micro.indices.tolist(), *(part.clone() for part in batch)]
    return made


def same(one: dict[tuple[int, int], Any], other: dict[tuple[int, int], Any]) -> bool:
    return one.keys() == other.keys() and all(
        one[key][0] == other[key][0] and all(map(torch.equal, one[key][1:], other[key][1:])) for key in one
    )


def test_batches_are_the_same_on_any_number_of_ranks_and_workers(folder: Path) -> None:
    alone = fetched(folder, 1, 0)
    assert same(fetched(folder, 1, 2), alone) and same(fetched(folder, 2, 1), alone)
    different = {tuple(batch[1].flatten().tolist()) for batch in alone.values()}
    assert len(different) == len(alone)


def test_a_file_that_cannot_be_read_is_left_out_of_its_batch_wherever_that_is_made(tmp_path: Path) -> None:
    paint(tmp_path, 12, 60, 40)
    broken = tmp_path / "train/0/00004.jpg"
    broken.write_bytes(broken.read_bytes()[:700])
    told: list[BadSample] = []
    alone = fetched(tmp_path / "train", 1, 0, told)
    assert {bad.file for bad in told} == {str(broken)}
    assert same(fetched(tmp_path / "train", 1, 2, []), alone)
    assert sorted(len(batch[1]) for batch in alone.values()).count(2) >= 2
    with pytest.raises(TrainingFailed, match=r"00004\.jpg: image file is truncated"):
        fetched(tmp_path / "train", 1, 0)


@pytest.mark.parametrize("kind", ["RGB", "L", "CMYK", "progressive", "444", "rgb", "png", "webp"])
def test_a_reader_sees_what_pillow_sees_and_asks_once_which_part(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"x.{kind if kind in ('png', 'webp') else 'jpg'}"
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 5, 3), dtype=np.uint8)).resize((51, 37))
    options: dict[str, Any] = {
        "progressive": {"progressive": True},
        "444": {"subsampling": 0},
        "rgb": {"keep_rgb": True},
    }
    picture.convert(kind if kind in ("L", "CMYK") else "RGB").save(path, **options.get(kind, {}))
    asked = []

    def choose(width: int, height: int) -> Any:
        asked.append((width, height))
        return centre_crop(width, height, 32, 32)

    pixels, cut = read_image(str(path), choose)
    assert (pixels.shape, cut.width, cut.height) == ((37, 51, 3), 51, 37)
    assert np.abs(pixels.astype(int) - np.asarray(Image.open(path).convert("RGB")).astype(int)).max() <= 2
    assert asked == [(51, 37)]


def read(path: Path) -> Any:
    """All of a picture, as it is decoded."""
    return read_image(str(path), lambda width, height: Crop(0, 0, width, height, 1, (width, height)))[0]


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_16_bits_are_scaled_to_8(tmp_path: Path, suffix: str) -> None:
    Image.fromarray(RAMP).save(tmp_path / f"x.{suffix}")
    pixels = read(tmp_path / f"x.{suffix}")
    assert pixels.dtype == np.uint8 and pixels.shape == (32, 48, 3)
    assert np.array_equal(pixels[:, :, 2], np.rint(RAMP / 257).astype(np.uint8))


@pytest.mark.parametrize(("mode", "suffix"), [("P", "png"), ("LA", "png"), ("RGBA", "png"), ("1", "png"), ("P", "gif")])
def test_every_mode_is_seen_as_pillow_sees_it(tmp_path: Path, mode: str, suffix: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    path = tmp_path / f"x.{suffix}"
    Image.fromarray(noise).resize((40, 40)).convert(mode).save(path)
    assert np.array_equal(read(path), np.array(Image.open(path).convert("RGB")))


def test_a_file_that_is_no_whole_image_is_named_with_the_reason(tmp_path: Path) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    noise.save(tmp_path / "whole.jpg"), noise.save(tmp_path / "whole.png")
    jpeg, content = (tmp_path / "whole.jpg").read_bytes(), (tmp_path / "whole.png").read_bytes()
    start = jpeg.index(b"\xff\xc0") + 5
    files = {
        "truncated.jpg": (jpeg[: len(jpeg) // 2], "truncated"),
        "truncated.png": (content[: len(content) // 2], "truncated"),
        "head.jpg": (jpeg[:200], "Truncated|no image"),
        "zero.jpg": (b"", "empty"),
        "page.jpg": (b"<html>", "no image"),
        "bomb.jpg": (jpeg[:start] + b"\xff\xff\xff\xff" + jpeg[start + 4 :], "exceeds limit"),
        "bomb.png": (content[:16] + b"\0\0\xff\xff" * 2 + content[24:], "exceeds limit|no image"),
    }
    (tmp_path / "folder.png").mkdir()
    for name, (damaged, _) in files.items():
        (tmp_path / name).write_bytes(damaged)
    others = {"folder.png": "Is a directory", "gone.png": "No such file"}
    for name, reason in {**{name: reason for name, (_, reason) in files.items()}, **others}.items():
        with pytest.raises(TrainingFailed, match=reason) as caught:
            read(tmp_path / name)
        assert str(caught.value).startswith(f"{tmp_path / name}: ") and "\n" not in str(caught.value)


def test_normalised_bytes_have_the_mean_and_deviation_that_was_asked_for() -> None:
    mean, deviation = (0.5, 0.25, 0.0), (0.5, 0.25, 2.0)
    batch = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8)
    expected = (batch.double() / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(deviation).view(3, 1, 1)
    made = Normalise(mean, deviation)(batch)
    assert made.dtype == torch.float32 and made.is_contiguous()
    torch.testing.assert_close(made.double(), expected, atol=1e-6, rtol=1e-5)


def test_what_a_task_does_on_the_device_is_seeded_by_the_micro_batch_and_not_as_fetching_is() -> None:
    class Numbers:
        def __len__(self) -> int:
            return 55

        def __getitem__(self, index: int) -> Any:
            return torch.tensor(index), torch.rand(())

    def made(rank: int, world: int, workers: int) -> dict[tuple[int, int], Any]:
        plan = Plan(length=55, batch_size=16, micro_batch_size=4, seed=2)
        with Loader(
            Numbers(),
            {},
            collate=None,
            workers=workers,
            device=CPU,
            dtype=torch.float64,
            on_device=lambda batch: [*batch, torch.rand(3), random.random()],
        ) as loader:
            stream = loader.batches(micro_batches_of(plan, Sharing(rank, world), first=0, last=5))
            found = {(micro.step, micro.number): batch for micro, batch in stream}
        assert all(batch[2].dtype == torch.float64 and batch[0].dtype == torch.int64 for batch in found.values())
        return {
            key: [batch[0].tolist(), batch[1].tolist(), batch[2].tolist(), batch[3]] for key, batch in found.items()
        }

    alone = made(0, 1, 0)
    assert made(0, 1, 2) == alone and made(0, 2, 0) | made(1, 2, 1) == alone
    assert len({batch[3] for batch in alone.values()}) == len(alone)
    assert all(set(batch[1]).isdisjoint(batch[2]) for batch in alone.values())


def test_a_fetched_micro_batch_is_bytes(folder: Path) -> None:
    micro = MicroBatch(step=0, number=0, indices=np.arange(4), seed=7)
    batch, labels = fetcher(pictures(folder), collate_images)(micro)
    assert (batch.dtype, batch.shape, labels.dtype) == (torch.uint8, (4, 3, 32, 32), torch.int64)

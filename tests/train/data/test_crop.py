"""The part of a picture that is seen: distributed as torchvision's, and pixels as Pillow's."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import CenterCrop, Compose, RandomHorizontalFlip, RandomResizedCrop, Resize

from train.bench.input import scene
from train.data.crop import Crop, centre_crop, random_crop, resize_into
from train.data.image_files import CropTransform, read_image

DRAWS = 20_000


def distance(one: list[float], other: list[float]) -> float:
    """Kolmogorov and Smirnov's: the largest difference of the two distribution functions, in units of what 20,000
    draws of one distribution differ by once in a hundred times."""
    points = np.sort(np.concatenate([one, other]))
    functions = [np.searchsorted(np.sort(values), points, side="right") / len(values) for values in (one, other)]
    return float(np.abs(functions[0] - functions[1]).max() / (1.63 * np.sqrt(2 / DRAWS)))


def of_box(left: float, top: float, width: float, height: float, whole: tuple[int, int]) -> dict[str, float]:
    return {
        "area": width * height / (whole[0] * whole[1]), "ratio": width / height,
        "left": left / max(whole[0] - width, 1), "top": top / max(whole[1] - height, 1),
    }  # fmt: skip


def drawn(draw: Callable[[], dict[str, float]]) -> dict[str, list[float]]:
    made = [draw() for _ in range(DRAWS)]
    return {name: [values[name] for values in made] for name in made[0]}


@pytest.mark.minutes
@pytest.mark.parametrize("whole", [(500, 375), (40, 900), (64, 64)])
def test_random_parts_are_distributed_as_torchvisions(whole: tuple[int, int]) -> None:
    random.seed(1), torch.manual_seed(1)
    picture = torch.empty(3, whole[1], whole[0])

    def theirs() -> dict[str, float]:
        top, left, height, width = RandomResizedCrop.get_params(picture, [0.08, 1.0], [3 / 4, 4 / 3])
        return of_box(left, top, width, height, whole)

    def ours(low: float = 0.0) -> dict[str, float]:
        cut = random_crop(*whole, 224)
        assert cut.to == (224, 224) and cut.at == (0, 0) and cut.left >= 0 and cut.top >= 0
        assert cut.left + cut.width <= whole[0] and cut.top + cut.height <= whole[1]
        return of_box(cut.left, cut.top, cut.width, cut.height, whole)

    one, other = drawn(theirs), drawn(ours)
    for name in one:
        assert distance(one[name], other[name]) < 1, name
    # the measure sees a difference: two per cent smaller parts
    assert distance(one["area"], [0.98 * area for area in other["area"]]) > 1


@pytest.mark.parametrize("choose", [lambda: random_crop(50, 40, 8), lambda: centre_crop(50, 40, 8, 9, flips=True)])
def test_every_second_picture_is_mirrored(choose: Callable[[], Crop]) -> None:
    random.seed(0)
    share = sum(choose().is_mirrored for _ in range(DRAWS)) / DRAWS
    assert abs(share - RandomHorizontalFlip().p) < 3 * 0.5 / DRAWS**0.5


def square(picture: Any, cut: Crop) -> Any:
    made = np.empty((3, cut.size, cut.size), np.uint8)
    resize_into(made, np.asarray(picture).copy(), cut)
    return made.transpose(1, 2, 0).astype(int)


def test_pixels_of_a_random_part_are_pillows() -> None:
    random.seed(2)
    picture = Image.fromarray(scene(0, 500, 375))
    for _ in range(40):
        cut = random_crop(500, 375, 224)
        box = (cut.left, cut.top, cut.left + cut.width, cut.top + cut.height)
        expected = picture.crop(box).resize((224, 224), Image.Resampling.BILINEAR)
        if cut.is_mirrored:
            expected = expected.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        assert np.abs(square(picture, cut) - np.asarray(expected).astype(int)).max() <= 1


@pytest.mark.parametrize("whole", [(500, 375), (375, 500), (224, 224), (256, 256), (100, 90), (31, 200), (1001, 777)])
def test_pixels_of_the_middle_are_those_of_torchvisions_resize_and_crop(whole: tuple[int, int]) -> None:
    picture = Image.fromarray(scene(0, *whole))
    expected = np.asarray(Compose([Resize(256), CenterCrop(224)])(picture)).astype(int)
    assert np.abs(square(picture, centre_crop(*whole, 224, 256)) - expected).max() <= 1


def test_a_jpeg_that_is_much_larger_than_what_is_seen_of_it_is_decoded_smaller_and_looks_the_same(
    tmp_path: Path,
) -> None:
    path = tmp_path / "large.jpg"
    Image.fromarray(scene(0, 2003, 1501)).save(path, quality=90)
    whole = np.asarray(Image.open(path))
    for cut, by in (
        (Crop(0, 0, 2003, 1501, 224, (224, 224)), 2),
        (Crop(101, 57, 1802, 1440, 100, (100, 100)), 4),
        (Crop(101, 57, 1802, 1440, 32, (32, 32)), 8),
        (Crop(101, 57, 1802, 440, 224, (224, 224)), 1),
        (Crop(1, 1, 2002, 1500, 224, (224, 224), is_mirrored=True), 2),
    ):
        pixels, reduced = read_image(str(path), lambda width, height, cut=cut: cut)
        assert cut.reduction == by and pixels.shape == (-(-1501 // by), -(-2003 // by), 3)
        difference = np.abs(square(pixels, reduced) - square(whole, cut))
        assert difference.max() <= (1 if by == 1 else 24) and difference.mean() < 2.5


def test_a_picture_of_a_torchvision_data_set_gets_the_same_square(tmp_path: Any) -> None:
    path = tmp_path / "x.jpg"
    Image.fromarray(scene(0, 300, 200)).save(path)
    random.seed(5)
    by_transform = CropTransform(lambda width, height: random_crop(width, height, 64), 64)(Image.open(path))
    random.seed(5)
    pixels, cut = read_image(str(path), lambda width, height: random_crop(width, height, 64))
    made = np.empty((3, 64, 64), np.uint8)
    resize_into(made, pixels, cut)
    assert by_transform.shape == (3, 64, 64) and np.array_equal(by_transform.numpy(), made)


@pytest.mark.parametrize("mode", ["L", "1", "P", "RGBA", "I;16", "F"])
def test_pictures_of_every_mode_become_bytes(mode: str) -> None:
    picture = Image.fromarray(np.full((30, 40), 200, np.uint8))
    if mode == "I;16":
        picture = Image.fromarray(np.full((30, 40), 200 * 257, np.uint16))
    elif mode == "F":
        picture = Image.fromarray(np.full((30, 40), 200 / 255, np.float32))
    else:
        picture = picture.convert(mode)
    made = CropTransform(lambda width, height: centre_crop(width, height, 16, 16), 16)(picture)
    assert made.shape == (3, 16, 16) and made.dtype == torch.uint8
    # of one bit, Pillow makes a pattern of dots
    assert (made.float() - 200).abs().mean() < (20 if mode == "1" else 0.01)

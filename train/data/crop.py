"""Random and centre crops of images, their mirroring and resizing: which part of an image the model sees.

Named after what torchvision's RandomResizedCrop and CenterCrop do, on arrays of bytes.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import interpolate

Pixels = npt.NDArray[np.uint8]
"""(height, width, 3) or, of a square to be filled, (3, size, size)."""
AREA, RATIO, TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10
"""Ranges of a random crop: its share of the image's area, its width over height; and the number of draws until one
fits.

As torchvision's RandomResizedCrop has them (Szegedy et al., Going deeper with convolutions, 2014).
"""
_GAP = 2
"""An image is decoded at a half, a quarter or an eighth of its size while its crop stays this many times larger than
its target, so that the resize smooths over more than the decoder's step (Pillow's reducing_gap)."""


@dataclasses.dataclass(frozen=True)
class Crop:
    """The part of an image that the model sees: a box of it is resized, and a square is taken of that."""

    left: int
    top: int
    width: int
    height: int
    size: int
    """Pixels per side of the square."""
    to: tuple[int, int]
    """Width and height that the box is resized to."""
    at: tuple[int, int] = (0, 0)
    """Left and top of the square in the resized box."""
    is_mirrored: bool = False

    @property
    def reduction(self) -> int:
        """Factor by which the image may be decoded smaller: 1, 2, 4 or 8."""
        fits = (n for n in (8, 4, 2) if self.width >= _GAP * n * self.to[0] and self.height >= _GAP * n * self.to[1])
        return next(fits, 1)

    def reduced(self, by: int, width: int, height: int) -> Crop:
        """Return the same crop of the image decoded at 1/by of its size, which then has width x height pixels."""
        left, top = self.left // by, self.top // by
        right, bottom = min(-(-(self.left + self.width) // by), width), min(-(-(self.top + self.height) // by), height)
        return dataclasses.replace(self, left=left, top=top, width=right - left, height=bottom - top)


ChooseCrop = Callable[[int, int], Crop]
"""Maps an image's width and height to its crop. Draws from Python's generator."""


def centre_crop(width: int, height: int, size: int, to: int, flips: bool = False) -> Crop:
    """Return the square in the middle of the whole image, whose shorter side becomes `to` pixels."""
    short = min(width, height)
    across, down = to * width // short, to * height // short
    at = round((across - size) / 2), round((down - size) / 2)
    flipped = flips and random.random() < 0.5
    return Crop(left=0, top=0, width=width, height=height, size=size, to=(across, down), at=at, is_mirrored=flipped)


def random_crop(width: int, height: int, size: int) -> Crop:
    """Return a random crop of random shape; every second one is mirrored."""
    left, top, across, down = _random_box(width, height)
    return Crop(left, top, across, down, size, (size, size), is_mirrored=random.random() < 0.5)


def _random_box(width: int, height: int) -> tuple[int, int, int, int]:
    low, high = math.log(RATIO[0]), math.log(RATIO[1])
    for _ in range(TRIES):
        area, ratio = width * height * random.uniform(*AREA), math.exp(random.uniform(low, high))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            return random.randint(0, width - across), random.randint(0, height - down), across, down
    # an image too long for it: the largest part in the middle of a shape that is allowed
    across = min(width, max(1, round(height * RATIO[1])))
    down = min(height, max(1, round(width / RATIO[0])))
    return (width - across) // 2, (height - down) // 2, across, down


def resize_into(square: Pixels, image: Pixels, crop: Crop) -> None:
    """Resize the crop of the image into the square (3, size, size), with an antialiased bilinear filter.

    On 8-bit integers, as Pillow computes it: no value is further than 1 from Pillow's.
    """
    box = image[crop.top : crop.top + crop.height, crop.left : crop.left + crop.width]
    if (crop.width, crop.height) != crop.to:
        across, down = crop.to
        planes = torch.from_numpy(box).permute(2, 0, 1)[None]  # not copied: the filter reads pixel by pixel
        box = interpolate(planes, (down, across), mode="bilinear", antialias=True)[0].permute(1, 2, 0).numpy()
    left, top = crop.at
    part = box[top : top + crop.size, left : left + crop.size]
    np.copyto(square, (part[:, ::-1] if crop.is_mirrored else part).transpose(2, 0, 1))

"""Which part of a picture is seen, how large, and that part as a square of 8-bit pixels."""

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
"""Of a random crop: its share of the picture and width over height, from where; and draws until one fits.

As torchvision's RandomResizedCrop has them (Szegedy et al., Going deeper with convolutions, 2014).
"""
_GAP = 2
"""A picture is decoded at a half, a quarter or an eighth of its size while the part that is seen stays so many times
larger than what it becomes: what follows smooths over more than the decoder's step (Pillow calls it reducing_gap)."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """The part of a picture that is seen: a box of it is resized, and a square of that is what the model gets."""

    left: int
    top: int
    width: int
    height: int
    size: int
    """Of the square."""
    to: tuple[int, int]
    """Width and height that the box is resized to."""
    at: tuple[int, int] = (0, 0)
    """Left and top of the square in that."""
    is_mirrored: bool = False

    @property
    def reduction(self) -> int:
        """By how much the picture may be decoded smaller: 1, 2, 4 or 8."""
        fits = (n for n in (8, 4, 2) if self.width >= _GAP * n * self.to[0] and self.height >= _GAP * n * self.to[1])
        return next(fits, 1)

    def reduced(self, by: int, width: int, height: int) -> Cut:
        """The same of the picture decoded at 1/by of its size, width x height pixels then."""
        left, top = self.left // by, self.top // by
        right, bottom = min(-(-(self.left + self.width) // by), width), min(-(-(self.top + self.height) // by), height)
        return dataclasses.replace(self, left=left, top=top, width=right - left, height=bottom - top)


Choose = Callable[[int, int], Cut]
"""From width and height of a picture to the part that is seen. What is random in it comes from Python's generator."""


def centre(width: int, height: int, size: int, to: int, flips: bool = False) -> Cut:
    """The square in the middle of the whole picture, whose shorter side becomes `to` pixels."""
    short = min(width, height)
    across, down = to * width // short, to * height // short
    at = round((across - size) / 2), round((down - size) / 2)
    return Cut(0, 0, width, height, size, (across, down), at, flips and random.random() < 0.5)


def random_part(width: int, height: int, size: int) -> Cut:
    """A random part of random shape, every second one mirrored."""
    left, top, across, down = _random_box(width, height)
    return Cut(left, top, across, down, size, (size, size), is_mirrored=random.random() < 0.5)


def _random_box(width: int, height: int) -> tuple[int, int, int, int]:
    low, high = math.log(RATIO[0]), math.log(RATIO[1])
    for _ in range(TRIES):
        area, ratio = width * height * random.uniform(*AREA), math.exp(random.uniform(low, high))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            return random.randint(0, width - across), random.randint(0, height - down), across, down
    # a picture too long for it: the largest part in the middle of a shape that is allowed
    across = min(width, max(1, round(height * RATIO[1])))
    down = min(height, max(1, round(width / RATIO[0])))
    return (width - across) // 2, (height - down) // 2, across, down


def fill(square: Pixels, picture: Pixels, cut: Cut) -> None:
    """Put the part of the picture into the square, which is (3, size, size); by an antialiased bilinear filter.

    On 8-bit integers, as Pillow computes it: no value is further than 1 from Pillow's.
    """
    box = picture[cut.top : cut.top + cut.height, cut.left : cut.left + cut.width]
    if (cut.width, cut.height) != cut.to:
        across, down = cut.to
        planes = torch.from_numpy(box).permute(2, 0, 1)[None]  # not copied: the filter reads pixel by pixel
        box = interpolate(planes, (down, across), mode="bilinear", antialias=True)[0].permute(1, 2, 0).numpy()
    left, top = cut.at
    part = box[top : top + cut.size, left : left + cut.size]
    np.copyto(square, (part[:, ::-1] if cut.is_mirrored else part).transpose(2, 0, 1))

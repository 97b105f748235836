"""Image files as a data set: decoded, cropped and put into a micro batch in place, as bytes until on the device."""

from __future__ import annotations

import dataclasses
import io
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset, default_collate, get_worker_info

from train.data.fetch import passes
from train.errors import TrainingFailed, one_line

Pixels = npt.NDArray[np.uint8]
"""(height, width, 3) or, of a square to be filled, (3, size, size)."""
_PIXELS = 178_956_970
"""A JPEG of more pixels is left to Pillow, which takes it for a decompression bomb."""
_SCRATCH = 1 << 24
"""Bytes of a decoded picture up to which memory is kept for the next one: fresh memory costs a tenth of decoding."""
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


class Reader:
    """Reads image files of which a part is wanted. For one thread at a time: what was decoded last is written over."""

    def __init__(self) -> None:
        self._scratch = np.empty(0, np.uint8)

    def read(self, path: str, choose: Choose) -> tuple[Pixels, Cut]:
        """An image file as RGB pixels of 8 bits, and which part of them is seen. As long as nothing else is read.

        JPEG is decoded at reduced size where the part is still large enough then.

        Args:
            choose: called once, with the width and height that the file says.

        Raises:
            TrainingFailed: it is no image, or a damaged one; the message begins with its path.
            OSError: the disk or the network does not give it out, which may pass.
        """
        try:
            with open(path, "rb") as file:  # noqa: PTH123
                content = file.read()
            if not content:
                raise ValueError("the file is empty")
            return self._decoded(content, choose)
        except Exception as error:
            if passes(error):
                raise
            reason = one_line(error.strerror if isinstance(error, OSError) and error.strerror else error)
            if reason.startswith("cannot identify image"):
                reason = "this is no image, or its beginning is damaged"
            raise TrainingFailed(f"{path}: {reason}") from error

    def _decoded(self, content: bytes, choose: Choose) -> tuple[Pixels, Cut]:
        from PIL import Image

        size, cut = _plain_jpeg(content), None
        if size is not None:
            cut = choose(*size)
            found = self._reduced(content, cut, *size)
            if found is not None:
                return found
        with Image.open(io.BytesIO(content)) as image:
            pixels = of_pillow(image)
        return pixels, cut or choose(pixels.shape[1], pixels.shape[0])

    def _reduced(self, content: bytes, cut: Cut, width: int, height: int) -> tuple[Pixels, Cut] | None:
        import simplejpeg

        by = cut.reduction
        across, down = -(-width // by), -(-height // by)
        size = 3 * across * down
        if self._scratch.size < size <= _SCRATCH:
            self._scratch = np.empty(size, np.uint8)
        buffer = self._scratch if size <= self._scratch.size else None
        try:
            pixels = simplejpeg.decode_jpeg(content, min_height=down, min_width=across, buffer=buffer)
        except ValueError:  # damaged, it may be: of that Pillow says more
            return None
        return pixels, cut if by == 1 else cut.reduced(by, pixels.shape[1], pixels.shape[0])


def _plain_jpeg(content: bytes) -> tuple[int, int] | None:
    """Width and height of a JPEG in a usual colour space; None of anything else."""
    if not content.startswith(b"\xff\xd8\xff"):
        return None
    import simplejpeg

    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(content)
    except ValueError:
        return None
    return (width, height) if space in ("YCbCr", "Gray", "RGB") and width * height <= _PIXELS else None


def of_pillow(image: Any) -> Pixels:
    """Pillow's picture as RGB pixels: 16 bits become 8, transparency is dropped."""
    if image.mode.startswith("I"):  # Pillow would cut off all above 255 instead of scaling
        plane = (np.array(image, np.int32).clip(0, 65535) + 128) // 257
        return np.repeat(plane.astype(np.uint8)[:, :, None], 3, axis=2)
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return np.array(image.convert("RGB"))


Vary = Callable[[Tensor], Tensor]
"""What else is done with a square of pixels, (3, size, size) of uint8."""


class Rows(list[tuple[Tensor, int]]):
    """Items whose pictures lie one after the other in one tensor, (items, 3, size, size)."""

    def __init__(self, pictures: Tensor, labels: Sequence[int]) -> None:
        super().__init__(zip(pictures, labels, strict=True))
        self.batch = [pictures, torch.tensor(labels)]


def collate_rows(items: list[Any]) -> Any:
    """Items as a batch: of Rows without a copy, of others as torch does it."""
    return items.batch if isinstance(items, Rows) else default_collate(items)


class Pictures(Dataset[tuple[Tensor, int]]):
    """Image files, each with the number of its class; an item is (uint8 of shape (3, size, size), class)."""

    def __init__(
        self, root: str, samples: list[tuple[str, int]], classes: list[str], size: int, choose: Choose,
        vary: Vary | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            samples: file and number of its class.
            choose: which part of a picture is seen.
        """
        self.root, self.samples, self.classes = root, samples, classes
        self.targets = [label for _, label in samples]
        self._size, self._choose, self._vary = size, choose, vary

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> Rows:
        """These items; `collate_rows` makes the batch of them without a copy."""
        pictures = _room((len(indices), 3, self._size, self._size))
        reader, rows = Reader(), pictures.numpy()
        for row, index in enumerate(indices):
            pixels, cut = reader.read(self.samples[index][0], self._choose)
            fill(rows[row], pixels, cut)
            if self._vary is not None:
                pictures[row] = self._vary(pictures[row])
        return Rows(pictures, [self.targets[index] for index in indices])


class Framed:
    """What turns a decoded picture, Pillow's or a tensor, into its square: the transform of a torchvision data set."""

    def __init__(self, choose: Choose, size: int, vary: Vary | None = None) -> None:
        """
        Args:
            vary: what else is done with the square, (3, size, size) of uint8.
        """
        self._choose, self._size, self._vary = choose, size, vary

    def __call__(self, picture: Any) -> Tensor:
        from PIL import Image
        from torchvision.transforms.v2 import functional as to

        if isinstance(picture, Image.Image) and picture.mode != "F":
            pixels = of_pillow(picture)
        else:
            planes = to.grayscale_to_rgb(to.to_dtype(to.to_image(picture), torch.uint8, scale=True))
            pixels = np.ascontiguousarray(planes.permute(1, 2, 0).numpy())
        square = torch.empty((3, self._size, self._size), dtype=torch.uint8)
        fill(square.numpy(), pixels, self._choose(pixels.shape[1], pixels.shape[0]))
        return square if self._vary is None else self._vary(square)


def _room(shape: tuple[int, ...]) -> Tensor:
    """Memory for bytes; in a loader process where the training process finds it too, or it would be copied there."""
    count = torch.Size(shape).numel()
    if get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
    storage = torch.UntypedStorage._new_shared(count)  # as torch's own collation does it
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, shape)  # type: ignore[call-overload]


class Normalise:
    """From bytes to floating point numbers of mean 0 and deviation 1, on the device where the bytes are."""

    def __init__(self, mean: tuple[float, ...], deviation: tuple[float, ...]) -> None:
        """
        Args:
            mean, deviation: by channel, where bytes stand for 0 to 1.
        """
        self._mean, self._deviation = mean, deviation
        self._made: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __call__(self, pictures: Tensor) -> Tensor:
        """(n, channels, height, width) of uint8 as float32."""
        mean, factor = self._constants(pictures.device)
        if pictures.device.type != "cpu":
            return pictures.float().sub_(mean).mul_(factor)
        made = torch.empty(pictures.shape)
        for row, picture in zip(made, pictures, strict=True):  # one after the other stays in the cache
            row.copy_(picture).sub_(mean).mul_(factor)
        return made

    def _constants(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._made:
            # filled there: a copy from here would wait for all that the device has to do

            def column(values: list[float]) -> Tensor:
                return torch.cat([torch.full((1, 1, 1), value, device=device) for value in values])

            self._made[device] = (
                column([255 * mean for mean in self._mean]),
                column([1 / (255 * deviation) for deviation in self._deviation]),
            )
        return self._made[device]

"""Image files as a dataset: decoded, cropped and written into a micro batch in place. They are bytes until they are on
the device."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate, get_worker_info

from ..errors import TrainingFailed, one_line
from .crop import ChooseCrop, Crop, Pixels, resize_into
from .fetch import passes

_PIXELS = 178_956_970
"""Maximum number of pixels of a JPEG here. Pillow reads larger ones, and refuses them as decompression bombs."""


def read_image(path: str, choose: ChooseCrop) -> tuple[Pixels, Crop]:
    """Read an image file as RGB pixels of 8 bits, at the resolution that its crop needs. Also returns the crop in these
    pixels.

    JPEG is decoded at reduced size if the crop is still large enough then.

    Args:
        choose: called once, with the file's width and height.

    Raises:
        TrainingFailed: the file is not an image, or is damaged; the message begins with its path.
        OSError: the disk or the network does not deliver the file, which may pass.
    """
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            content = file.read()
        if not content:
            raise ValueError("the file is empty")
        return _decoded(content, choose)
    except Exception as error:
        if passes(error):
            raise
        reason = one_line(error.strerror if isinstance(error, OSError) and error.strerror else error)
        if reason.startswith("cannot identify image"):
            reason = "this is no image, or its beginning is damaged"
        raise TrainingFailed(f"{path}: {reason}") from error


def _decoded(content: bytes, choose: ChooseCrop) -> tuple[Pixels, Crop]:
    import simplejpeg
    from PIL import Image

    crop = None
    with contextlib.suppress(ValueError):  # no JPEG, or a damaged one: Pillow's message says more
        height, width, space, _ = simplejpeg.decode_jpeg_header(content)
        if space in ("YCbCr", "Gray", "RGB") and width * height <= _PIXELS:
            crop = choose(width, height)
            by = crop.reduction
            pixels = simplejpeg.decode_jpeg(content, min_height=-(-height // by), min_width=-(-width // by))
            return pixels, crop if by == 1 else crop.reduced(by, pixels.shape[1], pixels.shape[0])
    with Image.open(io.BytesIO(content)) as image:
        pixels = rgb_pixels(image)
    return pixels, crop or choose(pixels.shape[1], pixels.shape[0])


def rgb_pixels(image: Any) -> Pixels:
    """Return Pillow's image as RGB pixels: 16 bits become 8, transparency is dropped."""
    if image.mode.startswith("I"):  # Pillow would cut off all above 255 instead of scaling
        plane = (np.array(image, np.int32).clip(0, 65535) + 128) // 257
        return np.repeat(plane.astype(np.uint8)[:, :, None], 3, axis=2)
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return np.array(image.convert("RGB"))


Augment = Callable[[Tensor], Tensor]
"""An augmentation of a cropped square, (3, size, size) of uint8."""


class ImageItems(list[tuple[Tensor, int]]):
    """Items whose images lie one after the other in one tensor, (items, 3, size, size)."""

    def __init__(self, images: Tensor, labels: Sequence[int]) -> None:
        super().__init__(zip(images, labels, strict=True))
        self.batch = [images, torch.tensor(labels)]


def collate_images(items: list[Any]) -> Any:
    """Make a batch of items: without a copy for ImageItems, as torch does it for others."""
    return items.batch if isinstance(items, ImageItems) else default_collate(items)


class ImageFiles(Dataset[tuple[Tensor, int]]):
    """Image files, each with the number of its class; an item is (uint8 of shape (3, size, size), class)."""

    def __init__(
        self, root: str, *, samples: list[tuple[str, int]], classes: list[str], size: int, choose: ChooseCrop,
        augment: Augment | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            samples: file and number of its class.
            choose: the crop of an image.
        """
        self.root, self.samples, self.classes = root, samples, classes
        self.targets = [label for _, label in samples]
        self._size, self._choose, self._augment = size, choose, augment

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> ImageItems:
        """Return these items; `collate_images` makes the batch without a copy."""
        images = _shared_buffer((len(indices), 3, self._size, self._size))
        rows = images.numpy()
        for row, index in enumerate(indices):
            pixels, crop = read_image(self.samples[index][0], self._choose)
            resize_into(rows[row], pixels, crop)
            if self._augment is not None:
                images[row] = self._augment(images[row])
        return ImageItems(images, [self.targets[index] for index in indices])


class CropTransform:
    """The transform of a torchvision dataset: crops a decoded image, Pillow's or a tensor, to its square."""

    def __init__(self, choose: ChooseCrop, size: int, augment: Augment | None = None) -> None:
        self._choose, self._size, self._augment = choose, size, augment

    def __call__(self, image: Any) -> Tensor:
        from PIL import Image
        from torchvision.transforms.v2 import functional as to

        if isinstance(image, Image.Image) and image.mode != "F":
            pixels = rgb_pixels(image)
        else:
            planes = to.grayscale_to_rgb(to.to_dtype(to.to_image(image), torch.uint8, scale=True))
            pixels = np.ascontiguousarray(planes.permute(1, 2, 0).numpy())
        square = torch.empty((3, self._size, self._size), dtype=torch.uint8)
        resize_into(square.numpy(), pixels, self._choose(pixels.shape[1], pixels.shape[0]))
        return square if self._augment is None else self._augment(square)


def _shared_buffer(shape: tuple[int, ...]) -> Tensor:
    """Return memory for bytes. A data worker shares it with the training process, which would else copy it."""
    count = torch.Size(shape).numel()
    if get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
    storage = torch.UntypedStorage._new_shared(count)  # as torch's own collation does it
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, shape)  # type: ignore[call-overload]


class Normalise:
    """Turns bytes into floating point numbers of mean 0 and deviation 1, on the device of the bytes."""

    def __init__(self, mean: tuple[float, ...], deviation: tuple[float, ...]) -> None:
        """Takes mean and deviation by channel, where bytes stand for 0 to 1."""
        self._mean, self._deviation = mean, deviation
        self._made: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __call__(self, images: Tensor) -> Tensor:
        """Turn uint8 of shape (n, channels, height, width) into float32."""
        mean, factor = self._constants(images.device)
        if images.device.type != "cpu":
            return images.float().sub_(mean).mul_(factor)
        made = torch.empty(images.shape)
        for row, image in zip(made, images, strict=True):  # one after the other stays in the cache
            row.copy_(image).sub_(mean).mul_(factor)
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

"""Image files with labels as a data set whose micro batches are filled in place, 8 bits a value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate, get_worker_info

from train.data.cut import Choose, fill
from train.data.picture import Reader, of_pillow

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
            planes = of_pillow(picture)
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

"""An image file as a tensor, whatever its format and depth; a file that is none is named."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from train.data.cut import Choose, Cut, Pixels
from train.data.fetch import passes
from train.errors import TrainingFailed, one_line

_PNG, _JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
PIXELS = 178_956_970
"""An image of more pixels than this is taken for a decompression bomb, as Pillow takes it."""


_SCRATCH = 1 << 24
"""Bytes of a decoded picture up to which memory is kept for the next one: fresh memory costs a tenth of decoding."""


def read(path: str) -> Tensor:
    """An image file as a uint8 RGB tensor (3, height, width). 16 bits become 8; transparency is dropped.

    Raises:
        TrainingFailed: it is no image, or a damaged one; the message begins with its path.
        OSError: the disk or the network does not give it out, which may pass.
    """
    return _named(path, _decoded)


class Reader:
    """Reads image files of which a part is wanted. For one thread at a time: what was decoded last is written over."""

    def __init__(self) -> None:
        self._scratch = np.empty(0, np.uint8)

    def read(self, path: str, choose: Choose) -> tuple[Pixels, Cut]:
        """An image file as RGB pixels, and which part of them is seen. As long as nothing else is read.

        JPEG is decoded at reduced size where the part is still large enough then.

        Args:
            choose: called once, with the width and height that the file says.

        Raises:
            TrainingFailed, OSError: as `read` in this file.
        """

        def decode(content: bytes) -> tuple[Pixels, Cut]:
            width, height = _plain_jpeg(content)
            cut = choose(width, height) if width else None
            found = self._decode(content, cut, width, height) if cut else None
            if found is not None:
                return found
            pixels = _decoded(content).permute(1, 2, 0).numpy()
            return pixels, cut or choose(pixels.shape[1], pixels.shape[0])

        return _named(path, decode)

    def _decode(self, content: bytes, cut: Cut, width: int, height: int) -> tuple[Pixels, Cut] | None:
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


def _plain_jpeg(content: bytes) -> tuple[int, int]:
    """Width and height of a JPEG in a usual colour space; (0, 0) of anything else."""
    if not content.startswith(_JPEG):
        return 0, 0
    import simplejpeg

    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(content)
    except ValueError:
        return 0, 0
    _check_size(width, height)
    return (width, height) if space in ("YCbCr", "Gray", "RGB") else (0, 0)


def _named(path: str, decode: Callable[[bytes], Any]) -> Any:
    """What is decoded of a file's content; what is wrong with it begins with its path."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            content = file.read()
        if not content:
            raise ValueError("the file is empty")
        return decode(content)
    except Exception as error:
        if passes(error):
            raise
        raise TrainingFailed(f"{path}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    text = one_line(error.strerror if isinstance(error, OSError) and error.strerror else error)
    return "this is no image, or its beginning is damaged" if text.startswith("cannot identify image") else text


def _decoded(content: bytes) -> Tensor:
    from torchvision.io import ImageReadMode, decode_image

    _check_size(*_size(content))
    if content.startswith((_PNG, _JPEG)):
        if content.startswith(_PNG):
            _check_sums(content)
        try:
            # a copy, for torch takes only memory that may be written
            pixels = decode_image(torch.frombuffer(bytearray(content), dtype=torch.uint8), ImageReadMode.RGB)
            return pixels if pixels.dtype == torch.uint8 else _to_8_bits(pixels.numpy())
        except RuntimeError:  # a colour space that only Pillow knows; of what is damaged Pillow says more
            pass
    return _by_pillow(content)


def _check_size(width: int, height: int) -> None:
    if width * height > PIXELS:
        raise ValueError(f"{width} x {height} pixels are too many to be a picture (at most {PIXELS})")


def _check_sums(content: bytes) -> None:
    """See that no part of a PNG was changed: Pillow overlooks some, and libpng prints lines of its own.

    Raises:
        ValueError: one was, or the end is missing.
    """
    at = len(_PNG)
    while content[at + 4 : at + 8] != b"IEND":
        end = at + 12 + int.from_bytes(content[at : at + 4], "big")
        if end > len(content):
            raise ValueError("the image is truncated")
        if zlib.crc32(content[at + 4 : end - 4]) != int.from_bytes(content[end - 4 : end], "big"):
            raise ValueError("the image is damaged: a check sum in it is wrong")
        at = end


def _by_pillow(content: bytes) -> Tensor:
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # PIXELS is the limit
        with Image.open(io.BytesIO(content)) as image:
            return of_pillow(image)


def of_pillow(image: Any) -> Tensor:
    """Pillow's picture as `read` gives one."""
    from torchvision.transforms.v2 import functional

    if image.mode.startswith("I"):  # Pillow would cut off all above 255 instead of scaling
        return _to_8_bits(np.array(image)[None].clip(0, 65535)).expand(3, -1, -1).contiguous()
    if image.mode == "P" and "transparency" in image.info:
        return functional.pil_to_tensor(image.convert("RGBA").convert("RGB"))
    return functional.pil_to_tensor(image.convert("RGB"))


def _to_8_bits(pixels: np.ndarray[Any, Any]) -> Tensor:
    """Values of 0 to 65535 as the nearest of 0 to 255."""
    return torch.from_numpy(((pixels.astype(np.int32) + 128) // 257).astype(np.uint8))


def _size(content: bytes) -> tuple[int, int]:
    """Width and height that a PNG or JPEG claims, before memory is taken for them; (0, 0) where that is not known."""
    if content.startswith(_PNG) and len(content) >= 24:
        return struct.unpack(">II", content[16:24])
    at = 2
    while content.startswith(_JPEG) and at + 9 <= len(content) and content[at] == 0xFF:
        kind = content[at + 1]
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):  # a start of frame
            height, width = struct.unpack(">HH", content[at + 5 : at + 9])
            return width, height
        # fill bytes stand alone, every other segment says its length
        at += 1 if kind == 0xFF else 2 + int.from_bytes(content[at + 2 : at + 4], "big")
    return 0, 0

"""An image file as a tensor, whatever its format and depth; a file that is none is named."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from train.data.fetch import passes
from train.errors import TrainingFailed, one_line

_PNG, _JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
PIXELS = 178_956_970
"""An image of more pixels than this is taken for a decompression bomb, as Pillow takes it."""


def read(path: str) -> Tensor:
    """An image file as a uint8 RGB tensor (3, height, width). 16 bits become 8; transparency is dropped.

    JPEG and PNG are decoded at three times Pillow's speed.

    Raises:
        TrainingFailed: it is no image, or a damaged one; the message begins with its path.
        OSError: the disk or the network does not give it out, which may pass.
    """
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            content = file.read()
        if not content:
            raise ValueError("the file is empty")
        return _decoded(content)
    except Exception as error:
        if passes(error):
            raise
        raise TrainingFailed(f"{path}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    text = one_line(error.strerror if isinstance(error, OSError) and error.strerror else error)
    return "this is no image, or its beginning is damaged" if text.startswith("cannot identify image") else text


def _decoded(content: bytes) -> Tensor:
    from torchvision.io import ImageReadMode, decode_image

    width, height = _size(content)
    if width * height > PIXELS:
        raise ValueError(f"{width} x {height} pixels are too many to be a picture (at most {PIXELS})")
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
    from torchvision.transforms.v2 import functional

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # PIXELS is the limit
        with Image.open(io.BytesIO(content)) as image:
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

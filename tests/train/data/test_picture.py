"""Image files of every depth and colour space become 8 bits RGB; what is damaged is named."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from train.data.picture import read
from train.errors import TrainingFailed

RAMP = np.linspace(0, 65535, 32 * 48).astype(np.uint16).reshape(32, 48)


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(path: Path, pixels: Any, colour: int, size: tuple[int, int] | None = None) -> None:
    """A 16-bit PNG, which Pillow writes in grey alone."""
    height, width = size or pixels.shape[:2]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, colour, 0, 0, 0))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


@pytest.mark.parametrize("colour", [0, 2, 4, 6])
def test_16_bits_are_scaled_to_8(tmp_path: Path, colour: int) -> None:
    channels = {0: [RAMP], 2: [RAMP, RAMP[::-1], RAMP], 4: [RAMP, RAMP], 6: [RAMP, RAMP[::-1], RAMP, RAMP]}[colour]
    png(tmp_path / "x.png", np.stack(channels, -1), colour)
    pixels = read(str(tmp_path / "x.png"))
    expected = torch.from_numpy(np.rint(RAMP / 257).astype(np.uint8))
    assert pixels.dtype == torch.uint8 and pixels.shape == (3, 32, 48)
    assert torch.equal(pixels[0], expected)
    assert torch.equal(pixels[1], expected.flip(0) if colour in (2, 6) else expected)


@pytest.mark.parametrize("suffix", ["tif", "pgm"])
def test_16_bits_of_other_formats_too(tmp_path: Path, suffix: str) -> None:
    Image.fromarray(RAMP).save(tmp_path / f"x.{suffix}")
    assert torch.equal(read(str(tmp_path / f"x.{suffix}"))[2], torch.from_numpy(np.rint(RAMP / 257).astype(np.uint8)))


@pytest.mark.parametrize(
    ("mode", "suffix"),
    [("CMYK", "jpg"), ("L", "jpg"), ("P", "png"), ("LA", "png"), ("RGBA", "png"), ("1", "png"), ("P", "gif"),
     ("RGB", "webp"), ("RGB", "bmp")],
)  # fmt: skip
def test_every_mode_is_seen_as_pillow_sees_it(tmp_path: Path, mode: str, suffix: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    path = tmp_path / f"x.{suffix}"
    Image.fromarray(noise).resize((40, 40)).convert(mode).save(path)
    pixels = read(str(path))
    expected = torch.from_numpy(np.array(Image.open(path).convert("RGB"))).permute(2, 0, 1)
    assert pixels.shape == (3, 40, 40) and pixels.dtype == torch.uint8
    assert (pixels.int() - expected.int()).abs().max() <= 2


def test_a_file_that_is_no_whole_image_is_named_with_the_reason(tmp_path: Path) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    noise.save(tmp_path / "whole.jpg"), noise.save(tmp_path / "whole.png")
    jpeg, content = (tmp_path / "whole.jpg").read_bytes(), (tmp_path / "whole.png").read_bytes()
    start = jpeg.index(b"\xff\xc0") + 5
    files = {
        "truncated.jpg": (jpeg[: len(jpeg) // 2], "truncated"),
        "truncated.png": (content[: len(content) // 2], "truncated"),
        "zero.jpg": (b"", "empty"),
        "page.jpg": (b"<html>", "no image"),
        "crc.png": (content[:-14] + bytes([content[-14] ^ 1]) + content[-13:], "check sum"),
        "bits.png": (content[:1000] + bytes([content[1000] ^ 1]) + content[1001:], "check sum"),
        "bomb.jpg": (jpeg[:start] + b"\xff\xff\xff\xff" + jpeg[start + 4 :], "65535 x 65535 pixels are too many"),
    }
    png(tmp_path / "bomb.png", RAMP, 0, (60000, 50000))
    (tmp_path / "folder.png").mkdir()
    for name, (damaged, _) in files.items():
        (tmp_path / name).write_bytes(damaged)
    others = {"bomb.png": "50000 x 60000", "folder.png": "Is a directory", "gone.png": "No such file"}
    for name, reason in {**{name: reason for name, (_, reason) in files.items()}, **others}.items():
        with pytest.raises(TrainingFailed, match=reason) as caught:
            read(str(tmp_path / name))
        assert str(caught.value).startswith(f"{tmp_path / name}: ") and "\n" not in str(caught.value)

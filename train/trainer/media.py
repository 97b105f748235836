"""Pictures, texts and sound of an evaluation: what a task's `images` and `compute_metrics` return beside numbers."""

from __future__ import annotations

import io
import math
import re
import sys
import wave
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import TrainingFailed

_SMALLEST = 64
"""Minimum number of pixels per side; the pixels of a smaller image are drawn larger."""
_FORMS = (
    "a matplotlib figure; a tensor of shape (C, H, W) or (N, C, H, W) with 1 or 3 channels, of numbers from 0 to 1 or "
    "of uint8; a text; or sound as (samples, rate) with samples of shape (N,) or (C, N) from -1 to 1"
)


class Media(NamedTuple):
    """A picture, a text or sound, as the content of a file."""

    suffix: str
    """`png`, `txt` or `wav`."""
    content: bytes


def encoded(function: str, made: Any) -> dict[str, Media]:
    """Return the pictures, texts and sounds that `images` returned, by name.

    Args:
        function: names the function and its file, for messages.

    Raises:
        TrainingFailed: it returned something else.
    """
    if not isinstance(made, dict):
        raise TrainingFailed(f"{function} must return a dict of pictures, got {type(made).__name__}")
    found = {}
    for name, value in made.items():
        media = encode(function, str(name), value)
        if media is None:
            what = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise TrainingFailed(f"{function} must return under {name} {_FORMS}; got {what}")
        found[str(name)] = media
    return found


def encode(function: str, name: str, value: Any) -> Media | None:
    """Return one picture, text or sound as a file; None: the value is none of them.

    Raises:
        TrainingFailed: the name cannot be that of a file.
    """
    media = _encode(value)
    if media is not None and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", name):
        raise TrainingFailed(f"{function} names a picture {name!r}; use letters, digits, _, . and -")
    return media


def _encode(value: Any) -> Media | None:
    if isinstance(value, str):
        return Media("txt", value.encode(errors="backslashreplace"))
    if hasattr(value, "savefig"):
        file = io.BytesIO()
        value.savefig(file, format="png")
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is not None:  # it holds on to what it has made
            pyplot.close(value)
        return Media("png", file.getvalue())
    if isinstance(value, tuple) and len(value) == 2:
        return _sound(*value)
    return _picture(value) if isinstance(value, Tensor) else None


def _picture(images: Tensor) -> Media | None:
    """Return one image, or several in a grid."""
    images = images.detach().cpu()
    images = images[None] if images.dim() == 3 else images
    is_float = images.is_floating_point()
    is_image = images.dim() == 4 and images.shape[1] in (1, 3) and (is_float or images.dtype == torch.uint8)
    if not is_image or not images.numel():
        return None
    if is_float:
        images = (images.float().nan_to_num(0.0).clamp(0, 1) * 255).round().byte()
    from PIL import Image
    from torchvision.utils import make_grid

    times = max(_SMALLEST // max(images.shape[2:]), 1)
    images = images.repeat_interleave(times, 2).repeat_interleave(times, 3)
    page = make_grid(images, nrow=math.ceil(math.sqrt(len(images))), pad_value=255)
    file = io.BytesIO()
    Image.fromarray(page.permute(1, 2, 0).contiguous().numpy()).save(file, "png")
    return Media("png", file.getvalue())


def _sound(samples: Any, rate: Any) -> Media | None:
    """Return sound as a WAV file of 16 bits."""
    is_tensor = isinstance(samples, Tensor) and samples.is_floating_point() and samples.dim() in (1, 2)
    if not is_tensor or not samples.numel() or not isinstance(rate, int) or not 0 < rate < 1 << 20:
        return None
    channels = samples.detach().cpu().float().nan_to_num(0.0).clamp(-1, 1).reshape(-1, samples.shape[-1])
    if len(channels) > 16:
        return None
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(len(channels))
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes((channels.T * 32767).round().short().contiguous().numpy().tobytes())
    return Media("wav", file.getvalue())

"""Pictures of an evaluation: what a task's `images` returns, as PNG files in the run folder."""

from __future__ import annotations

import io
import math
import re
import sys
from typing import Any

import torch
from torch import Tensor

from ..errors import TrainingFailed
from ..tasks import Task

_SMALLEST = 64
"""Minimum number of pixels per side; the pixels of a smaller image are drawn larger."""


def encoded(task: Task, made: Any) -> dict[str, bytes]:
    """Return the pictures that `images` returned, as PNG files by name.

    Raises:
        TrainingFailed: it returned something else.
    """
    if not isinstance(made, dict):
        raise TrainingFailed(f"images in {task.file} must return a dict of pictures, got {type(made).__name__}")
    found = {}
    for name, value in made.items():
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", str(name)):
            raise TrainingFailed(f"images in {task.file} names a picture {name!r}; use letters, digits, _, . and -")
        file = io.BytesIO()
        if hasattr(value, "savefig"):
            value.savefig(file, format="png")
            pyplot = sys.modules.get("matplotlib.pyplot")
            if pyplot is not None:  # it holds on to what it has made
                pyplot.close(value)
        else:
            from PIL import Image

            Image.fromarray(_grid(task, str(name), value).numpy()).save(file, "png")
        found[str(name)] = file.getvalue()
    return found


def _grid(task: Task, name: str, value: Any) -> Tensor:
    """Return one image, or several in a grid: bytes of shape (height, width, 3)."""
    images = value.detach().cpu() if isinstance(value, Tensor) else torch.empty(0)
    images = images[None] if images.dim() == 3 else images
    is_float = images.is_floating_point()
    is_image = images.dim() == 4 and images.shape[1] in (1, 3) and (is_float or images.dtype == torch.uint8)
    if not is_image or not images.numel():
        what = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TrainingFailed(
            f"images in {task.file} must return under {name} a matplotlib figure, or a tensor of shape (C, H, W) or "
            f"(N, C, H, W) with 1 or 3 channels, of numbers from 0 to 1 or of uint8; got {what}"
        )
    if is_float:
        images = (images.float().nan_to_num(0.0).clamp(0, 1) * 255).round().byte()
    from torchvision.utils import make_grid

    times = max(_SMALLEST // max(images.shape[2:]), 1)
    images = images.repeat_interleave(times, 2).repeat_interleave(times, 3)
    page = make_grid(images, nrow=math.ceil(math.sqrt(len(images))), pad_value=255)
    return page.permute(1, 2, 0).contiguous()

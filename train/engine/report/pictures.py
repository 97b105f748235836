"""A few samples of a batch as one picture, where they are images; found by their shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_MOST = 16
"""Samples in a picture."""
_SMALLEST, _LARGEST = 64, 512
"""Pixels of a side: smaller samples are shown larger, of larger ones every second, third, … pixel."""


def pictures(batch: Any) -> Tensor | None:
    """Samples of shape (n, 3, height, width), from 0 to 1, on the CPU; None where a batch holds no images.

    Images are the first tensor of a batch with 1 or 3 channels, before or after height and width, of at least 4 pixels
    a side. Each is stretched from its darkest to its brightest value: what normalised it is not known.
    """
    found = next((tensor for tensor in _tensors(batch) if _is_image(tensor)), None)
    if found is None:
        return None
    images = found.detach()[:_MOST].to("cpu", torch.float32)
    if images.shape[1] not in (1, 3):
        images = images.permute(0, 3, 1, 2)
    images = torch.nan_to_num(images, 0.0, 0.0, 0.0)
    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    images = (images - low) / (high - low).clamp_min(1e-12)
    images = images.expand(-1, 3, -1, -1)
    side = max(images.shape[2:])
    if side > _LARGEST:
        step = -(-side // _LARGEST)
        return images[:, :, ::step, ::step]
    times = max(_SMALLEST // side, 1)
    return images.repeat_interleave(times, 2).repeat_interleave(times, 3)


def _tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    inner = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return [value for value in inner if isinstance(value, Tensor)]


def _is_image(tensor: Tensor) -> bool:
    if tensor.dim() != 4 or not tensor.shape[0] or tensor.is_complex():
        return False
    _, first, height, last = tensor.shape
    return (first in (1, 3) and min(height, last) >= 4) or (last in (1, 3) and min(first, height) >= 4)

"""A forward that must leave no trace in the model's buffers: of an evaluation, or of data that are another rank's."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def untouched(model: nn.Module, most: float = math.inf) -> Iterator[None]:
    """Put back, at the end, each buffer where it was, and what was in it.

    Args:
        most: bytes above which a buffer's content is not kept: it holds weights (of fewer bits, say), no statistics.
    """
    before = [
        (part, name, buffer, None if buffer is None or buffer.nbytes > most else buffer.detach().clone())
        for part in model.modules()
        for name, buffer in part._buffers.items()
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for part, name, buffer, content in before:
                part._buffers[name] = buffer
                if buffer is not None and content is not None:
                    buffer.copy_(content)

"""A forward that must leave no trace in the model's state: of an evaluation, or of data that are another rank's."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from train.errors import TrainingFailed


@contextlib.contextmanager
def untouched(model: nn.Module, most: float = math.inf, moved: Sequence[nn.Parameter] = ()) -> Iterator[None]:
    """Put back, at the end, each buffer where it was, and what was in it.

    Args:
        most: bytes above which a buffer's content is not kept: it holds weights (of fewer bits, say), no statistics.
        moved: parameters that a forward changes, whose content is kept, too.
    """
    before = [
        (part, name, buffer, None if buffer is None or buffer.nbytes > most else buffer.detach().clone())
        for part in model.modules()
        for name, buffer in part._buffers.items()
    ]
    kept = [(parameter, parameter.detach().clone()) for parameter in moved]
    try:
        yield
    finally:
        with torch.no_grad():
            for part, name, buffer, content in before:
                part._buffers[name] = buffer
                if buffer is not None and content is not None:
                    buffer.copy_(content)
            for parameter, content in kept:
                parameter.copy_(content)


def normed(model: nn.Module) -> list[nn.Parameter]:
    """Weights that their layer keeps to a norm, in each forward."""
    layers = (nn.Embedding, nn.EmbeddingBag)
    return [p.weight for p in model.modules() if isinstance(p, layers) and p.max_norm is not None]  # type: ignore[misc]


@contextlib.contextmanager
def fixed(model: nn.Module, most: float, moved: Sequence[nn.Parameter]) -> Iterator[None]:
    """Have what `untouched` does not keep be as it was.

    Raises:
        TrainingFailed: it was changed.
    """
    others = {id(parameter) for parameter in moved}
    held: list[tuple[str, Tensor]] = []
    for name, parameter in model.named_parameters():
        if id(parameter) not in others and not isinstance(parameter, DTensor):  # what is gathered is thrown away
            held.append((name, parameter))
    held += [(name, buffer) for name, buffer in model.named_buffers() if buffer.nbytes > most]
    before = [(tensor._version, tensor.data_ptr()) for _, tensor in held]
    yield
    for (name, tensor), (version, place) in zip(held, before, strict=True):
        if tensor._version != version and tensor.data_ptr() == place:  # recurrent layers of cuDNN's move their weights
            raise TrainingFailed(
                f"an evaluation has changed {name} of the model, so that the weights would depend on when it is "
                "evaluated, and where; change it in training only (if self.training: …)"
            )

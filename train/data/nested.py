"""What is in a batch, however its task nests it: one walk for all that happens to its tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The value with everything in its lists, tuples, dicts and named tuples changed; these stay of their own kinds."""
    if isinstance(value, torch.Tensor):  # most batches are few of them
        return change(value)
    if isinstance(value, dict):
        made = copy.copy(value)  # a defaultdict cannot be made of items alone
        made.update({key: mapped(inner, change) for key, inner in value.items()})
        return made
    if isinstance(value, PackedSequence):  # a named tuple whose sizes stay on the host
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(inner, change) for inner in value))
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(inner, change) for inner in value)
    return change(value)

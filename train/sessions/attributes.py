"""Tells whether a script has set attributes of its data set, which data workers that stay would not see."""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..parallel.torch_private import version_of

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_LONG = 1000
"""Maximum number of items of a container, or an array, that are compared. A longer one holds samples."""
_MOST = 100_000
"""Maximum number of values that are compared."""
_DEEP = 8
"""Maximum number of objects on the way to a value: a part of a data set, the data set, its transforms, one of them."""
_CLOSED = (type, types.ModuleType, types.FunctionType, types.MethodType)


class _Same:
    """An object that equals only itself."""

    def __init__(self, one: Any) -> None:
        self._one = one

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._one is other._one

    __hash__ = None  # type: ignore[assignment]


def attributes_of(*holders: Any) -> Any:
    """Return what equals a later result if nothing was set meanwhile: values in attributes, and of what these hold.

    What is changed inside of large containers and arrays is not seen.
    """
    return _view(holders, _DEEP, iter(range(_MOST)))


def _view(one: Any, depth: int, left: Iterator[int]) -> Any:
    kind = type(one)
    if kind in _PLAIN:
        return kind, one
    if issubclass(kind, torch.Tensor):
        return _Same(one), 0 if one.is_inference() else version_of(one)
    if kind is np.ndarray and one.size <= _LONG and not one.dtype.hasobject:
        return one.shape, one.dtype, one.tobytes()
    if not depth or next(left, None) is None or issubclass(kind, _CLOSED):
        return _Same(one)
    parts: list[Any] = []
    if issubclass(kind, (dict, list, tuple, set, frozenset)):
        if len(one) > _LONG:
            return _Same(one), len(one)
        parts += one.items() if issubclass(kind, dict) else one
    else:
        try:
            parts += object.__getattribute__(one, "__dict__").items()
        except AttributeError:
            return _Same(one)
    return kind, [_view(part, depth - 1 + _is_item(part), left) for part in itertools.islice(parts, _LONG)]


def _is_item(part: Any) -> bool:
    """Whether a part is a name with its value, which is no object of its own."""
    return type(part) is tuple and len(part) == 2 and type(part[0]) is str

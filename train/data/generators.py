"""Random generators that a data set has of its own: `self.rng = np.random.default_rng(0)`.

Those of Python, NumPy and torch that everybody shares are seeded for each micro batch (seeds.py). One of its own would
go on from wherever it stands: in each loader process from the same place, after a resume from its beginning.
"""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from train.data.order import seed_of

_MOST = 4096
"""Objects that are looked at: a data set may hold millions of samples as objects."""
_LONG = 64
"""A list with more items holds samples, not parts of the data set."""
_LEAVES = (str, bytes, int, float, complex, type(None), type, types.ModuleType, np.ndarray, torch.Tensor)

Seed = Callable[[int], object]


def owned(*holders: Any) -> list[Seed]:
    """What seeds each generator that is found in these objects, and in what they hold; always in the same order."""
    return [seed for one in _within(holders) if (seed := _seed(one)) is not None]


def seed_owned(generators: list[Seed], seed: int) -> None:
    """Give each of them a seed that follows from this one."""
    for number, set_to in enumerate(generators):
        set_to(seed_of(seed, "own", number))


def _within(holders: tuple[Any, ...]) -> Iterator[Any]:
    seen: set[int] = set()
    ahead = list(holders)
    while ahead and len(seen) < _MOST:
        one = ahead.pop(0)
        if isinstance(one, _LEAVES) or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, dict):
            ahead += list(one.values()) if len(one) <= _LONG else []
        elif isinstance(one, list | tuple | set):
            ahead += list(one) if len(one) <= _LONG else []
        elif isinstance(one, functools.partial):
            ahead += [one.func, one.args, one.keywords]
        else:  # of a method, whose it is
            ahead += [getattr(one, "__self__", None), *getattr(one, "__dict__", {}).values()]


def _seed(one: Any) -> Seed | None:
    if isinstance(one, np.random.Generator):
        bits = one.bit_generator
        return lambda seed: setattr(bits, "state", type(bits)(seed).state)
    if isinstance(one, np.random.RandomState):
        return lambda seed: one.seed(seed & 0xFFFFFFFF)
    if isinstance(one, random.Random):
        return one.seed
    if isinstance(one, torch.Generator):
        return lambda seed: one.manual_seed(seed & (2**63 - 1))
    return None

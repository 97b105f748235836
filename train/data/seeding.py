"""Seeds the random generators that fetching and computing draw from.

Those of Python, NumPy and torch that everybody shares, and those that a task keeps (`self.rng = default_rng(0)` in a
data set, `rng = …` in its file): not seeded, one would go on from wherever it stands, in each loader process from the
same place, and after a resume from its beginning.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, get_worker_info

from train.data.order import seed_of

Seed = Callable[[int], object]
_DEPTH = 8
"""Objects on the way to a generator, itself counted: joined data sets, their list, a part of one, the data set, its
transforms, their list, one of them."""
_LONG = 64
"""A list with more items holds samples, not transforms."""
_SHARED = [id(random._inst), id(np.random.mtrand._rand), id(torch.default_generator)]
"""Seeded by `seed_host`."""


def seed_host(seed: int) -> None:
    """Seed Python's, NumPy's and torch's CPU generators."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed & (2**63 - 1))


def seed_compute(seed: int, device: torch.device, tag: str = "compute", own: Sequence[Seed] = ()) -> None:
    """Seed every generator that a forward pass may draw from, apart from those of fetching.

    Args:
        tag: what is computed.
        own: generators that the task keeps, from `owned`.
    """
    seed = seed_of(seed, tag)
    seed_host(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed & (2**63 - 1))
    if own:
        seed_owned(own, seed)


def seed_owned(generators: Sequence[Seed], seed: int) -> None:
    """Give each of the generators that a task keeps a seed that follows from this one."""
    for number, set_to in enumerate(generators):
        set_to(seed_of(seed, "own", number))


def owned(*holders: Any) -> list[Seed]:
    """Find the generators that a task keeps; returns what seeds each, always in the same order.

    They are looked for in attributes of these objects, of their classes, and of what these hold (modules, data sets,
    transforms in a list), and in the variables of the files that the objects and data sets come from.
    """
    seen: dict[int, Any] = {}
    found: list[Seed] = []
    level = [part for holder in holders for part in (holder, *_file(holder))]
    for _ in range(_DEPTH):
        level = [one for one in {id(one): one for one in level}.values() if id(one) not in seen]
        seen |= {id(one): one for one in level}
        found += [seed for one in level if (seed := _seed(one)) is not None]
        level = [part for one in level for part in _parts(one)]
    return found


def _file(one: Any) -> list[Any]:
    """The variables of the file that a function, or the class of another object, stands in."""
    kind = one if isinstance(one, types.FunctionType) else type(one)
    return list(vars(sys.modules.get(kind.__module__, types.SimpleNamespace())).values())


def _parts(one: Any) -> list[Any]:
    """What an object leads to."""
    held: list[Any] = []
    with contextlib.suppress(Exception):  # of a user's own class, whose methods may do anything
        if isinstance(one, (list, tuple)):
            return list(one) if len(one) <= _LONG else []
        if isinstance(one, (type, types.ModuleType, types.FunctionType, torch.Tensor)):
            return []
        held += [*vars(one).values(), *(value for kind in type(one).__mro__ for value in vars(kind).values())]
        if isinstance(one, nn.Module):
            held += one.modules()
        elif isinstance(one, Dataset):
            held += _file(one)
    return held


def _seed(one: Any) -> Seed | None:
    """What seeds it, if it is a generator."""
    kind = type(one)  # not isinstance, which asks a proxy what it stands for
    if id(one) in _SHARED:
        return None
    if issubclass(kind, np.random.Generator):
        return lambda seed: setattr(one.bit_generator, "state", type(one.bit_generator)(seed).state)
    if issubclass(kind, np.random.RandomState):
        return lambda seed: one.set_state(type(one._bit_generator)(seed).state)
    if issubclass(kind, random.Random):
        return one.seed
    return functools.partial(_seed_of_torch, one) if issubclass(kind, torch.Generator) else None


def _seed_of_torch(one: torch.Generator, seed: int) -> None:
    """That of a device only where it may draw: to seed it asks the driver, which ends a process forked from one that
    has opened the device, as those of a loader are."""
    if one.device.type == "cpu" or get_worker_info() is None:
        one.manual_seed(seed & (2**63 - 1))

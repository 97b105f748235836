"""Seeds the random generators that fetching and computing draw from.

These are the shared ones of Python, NumPy and torch, and those that a task keeps (`self.rng = default_rng(0)` in a
dataset, `rng = …` in its file). Without a seed, a generator would continue from where it is, in each data worker from
the same place, and after a resume from its start.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, get_worker_info

from . import reach
from .order import seed_of


class Seed(NamedTuple):
    """Seeds a generator that a task keeps."""

    key: int | str
    """Identifies the generator: the same in every process and attempt."""
    set_to: Callable[[int], object]


_DEPTH = 8
"""Maximum number of objects on the way to a generator, with the generator: joined datasets, their list, a part of one,
the dataset, its transforms, their list, one of them."""
_LONG = 64
"""Maximum number of items in a list of transforms. A longer list holds samples."""
_SHARED = [id(random._inst), id(np.random.mtrand._rand), id(torch.default_generator)]
"""Generators that `seed_host` seeds."""
_NUMBERED = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


def seed_host(seed: int) -> None:
    """Seed Python's, NumPy's and torch's CPU generators."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed & (2**63 - 1))


def seed_compute(seed: int, device: torch.device, *, tag: str = "compute", own: Sequence[Seed] = ()) -> None:
    """Seed every generator that a forward pass may draw from, with other seeds than for fetching.

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
    """Seed each generator that a task keeps, with a seed that follows from this one."""
    for key, set_to in generators:
        set_to(seed_of(seed, "own", key))


def owned(*holders: Any) -> list[Seed]:
    """Find the generators that a task keeps. Returns what seeds each, always in the same order."""
    return [*search(*holders)[0]]


def search(*holders: Any) -> tuple[list[Seed], str]:
    """Do the same as `owned`, and also return what is wrong with the search; '' if nothing is.

    The first search numbers what it finds, and seeds follow from these numbers. `reach` finds the others.
    """
    near = _near(holders)
    reached, problem = reach.generators(holders)
    known = {*_SHARED, *map(id, near)}
    # a generator is seeded by the state of its bits
    known |= {id(_bits(one)) for one in (np.random.mtrand._rand, *near, *(one for _, one in reached))}
    numbered = [Seed(number, _seed(one)) for number, one in enumerate(near)]
    hidden = [Seed(path, _seed(one)) for path, one in reached if id(one) not in known]
    return numbered + sorted(hidden, key=lambda seed: seed.key), problem


def _near(holders: Sequence[Any]) -> list[Any]:
    """Return the generators in attributes of these objects, of their classes and of what these hold (modules, datasets,
    transforms in a list), and in the variables of the files that the objects and datasets come from."""
    seen: dict[int, Any] = {}
    found: list[Any] = []
    level = [part for holder in holders for part in (holder, *_file(holder))]
    for _ in range(_DEPTH):
        level = [one for one in {id(one): one for one in level}.values() if id(one) not in seen]
        seen |= {id(one): one for one in level}
        found += [one for one in level if issubclass(type(one), _NUMBERED) and id(one) not in _SHARED]
        level = [part for one in level for part in _parts(one)]
    return found


def _file(one: Any) -> list[Any]:
    """Return the variables of the file that defines a function, or the class of another object."""
    kind = one if isinstance(one, types.FunctionType) else type(one)
    return list(vars(sys.modules.get(kind.__module__, types.SimpleNamespace())).values())


def _parts(one: Any) -> list[Any]:
    """Return what an object leads to."""
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


def _bits(one: Any) -> Any:
    """Return the bit generator of one of NumPy's generators; None for others."""
    if issubclass(type(one), np.random.RandomState):
        return one._bit_generator
    return one.bit_generator if issubclass(type(one), np.random.Generator) else None


def _seed(one: Any) -> Callable[[int], object]:
    """Return the function that seeds a generator."""
    kind = type(one)  # not isinstance, which asks a proxy what it stands for
    if issubclass(kind, np.random.Generator):
        return lambda seed: setattr(one.bit_generator, "state", type(one.bit_generator)(seed).state)
    if issubclass(kind, np.random.BitGenerator):
        return lambda seed: setattr(one, "state", kind(seed).state)
    if issubclass(kind, np.random.RandomState):
        return lambda seed: one.set_state(type(one._bit_generator)(seed).state)
    return one.seed if issubclass(kind, random.Random) else functools.partial(_seed_of_torch, one)


def _seed_of_torch(one: torch.Generator, seed: int) -> None:
    """Seed a generator of torch. A device's is seeded only in the process that may draw from it: seeding asks the
    driver, which would end a data worker, because that was forked beside an open device."""
    if one.device.type == "cpu" or get_worker_info() is None:
        one.manual_seed(seed & (2**63 - 1))

"""Random generators of a task's own: `self.rng = np.random.default_rng(0)` in a data set, `rng = …` in its file.

Those of Python, NumPy and torch that everybody shares are seeded for each micro batch (seeds.py). One of the task's own
would go on from wherever it stands: in each loader process from the same place, after a resume from its beginning. So
they are looked for, in what a task's objects and its code can reach, and seeded likewise.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import get_worker_info

from train.data.order import seed_of

_MOST = 4096
"""Objects that are looked at on the way from one: a data set may hold millions of samples as objects."""
_MOST_OF_ALL = 1 << 16
_LONG = 64
"""A list with more items holds samples, not parts of the data set."""
_LEAVES = (str, bytes, int, float, complex, type(None), np.ndarray, torch.Tensor)
_STEPS = (types.FunctionType, type, types.ModuleType, nn.Module, property, staticmethod, classmethod)
"""What is looked at after all data, and however much data there is."""
_SHARED = [id(random._inst), id(np.random.mtrand._rand), id(torch.default_generator)]
"""`from random import shuffle` leads to the first of them: seeds.py has seeded it."""
_NOT_USERS = [Path(__file__).parents[1], *map(Path, {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})]

Seed = Callable[[int], object]


def owned(*holders: Any) -> list[Seed]:
    """What seeds each generator that can be reached from these objects; always in the same order.

    In their attributes and slots and in what those hold, first; then in the closures and defaults of their functions,
    in their classes, and in the variables of the modules whose code that is, unless they are installed packages.
    """
    return [seed for one in _within(holders) if (seed := _seed(one)) is not None]


def seed_owned(generators: Sequence[Seed], seed: int) -> None:
    """Give each of them a seed that follows from this one."""
    for number, set_to in enumerate(generators):
        set_to(seed_of(seed, "own", number))


def _within(holders: tuple[Any, ...]) -> Iterator[Any]:
    """What can be reached."""
    seen: set[int] = set()
    data, later, left = deque[Any](), deque[Any](), _MOST

    def add(parts: Sequence[Any]) -> None:
        for part in parts:
            kind = type(part)  # not isinstance, which asks a proxy what it stands for
            if not issubclass(kind, _LEAVES) and id(part) not in seen:
                (later if issubclass(kind, _STEPS) else data).append(part)

    add(holders)
    while (data or later) and len(seen) < _MOST_OF_ALL:
        if not data or not left:
            data.clear()
            if not later:
                return
            left = _MOST
        one = data.popleft() if data else later.popleft()
        if id(one) in seen:
            continue
        left -= 1
        seen.add(id(one))
        yield one
        with contextlib.suppress(Exception):  # of a user's own class, whose methods may do anything
            add(_parts(one))


def _parts(one: Any) -> list[Any]:
    """What an object leads to. Runs no code of its class but how it is walked through."""
    if isinstance(one, types.ModuleType):
        return list(vars(one).values()) if _is_users(vars(one)) else []
    if isinstance(one, type):
        namespace = vars(sys.modules.get(one.__module__, types))
        return [*vars(one).values(), *one.__bases__] if _is_users(namespace) else []
    if isinstance(one, types.FunctionType):
        return _of_function(one)
    if isinstance(one, dict):
        return list(one.values()) if len(one) <= _LONG else []
    if isinstance(one, list | tuple | set | deque):
        return list(one) if len(one) <= _LONG else []
    if isinstance(one, functools.partial):
        return [one.func, one.args, one.keywords]
    if isinstance(one, property):
        return [one.fget]
    if isinstance(one, types.MethodType | staticmethod | classmethod):
        return [getattr(one, "__self__", None), one.__func__]
    if isinstance(one, types.BuiltinMethodType):
        return [one.__self__]
    held = [*getattr(one, "__dict__", {}).values()]
    if isinstance(one, nn.Module):
        held = [value for value in held if not (isinstance(value, Mapping) and not value)]  # hooks that it has not
        held += one._modules.values()  # however many
    return [*held, *_in_slots(one), type(one)]


def _of_function(function: types.FunctionType) -> list[Any]:
    cells = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # nothing is in it yet
            cells.append(cell.cell_contents)
    found = [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    found += vars(function).values()
    name = function.__globals__.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) else None
    return [*found, module] if module is not None and vars(module) is function.__globals__ else found


def _in_slots(one: Any) -> list[Any]:
    found = []
    for slot in _slots(type(one)):  # type: ignore[arg-type]
        with contextlib.suppress(AttributeError):  # nothing is in it yet
            found.append(slot.__get__(one))
    return found


@functools.cache
def _slots(kind: type) -> list[Any]:
    parts = [value for base in kind.__mro__ for value in vars(base).values()]
    return [value for value in parts if type(value) is types.MemberDescriptorType]


def _is_users(namespace: Mapping[str, Any]) -> bool:
    """Whether a module, given by its variables, is a user's own file: not installed, and not of this package."""
    file = namespace.get("__file__")
    return _is_users_file(file) if isinstance(file, str) else namespace.get("__name__") == "__main__"


@functools.cache
def _is_users_file(file: str) -> bool:
    path = Path(file)
    is_installed = {"site-packages", "dist-packages"} & set(path.parts)
    return not is_installed and not any(path.is_relative_to(place) for place in _NOT_USERS)


def _seed(one: Any) -> Seed | None:
    if id(one) in _SHARED:
        return None
    if issubclass(type(one), np.random.Generator):
        bits = one.bit_generator
        return lambda seed: setattr(bits, "state", type(bits)(seed).state)
    if issubclass(type(one), np.random.RandomState):
        bits = one._bit_generator
        if isinstance(bits, np.random.MT19937):
            return lambda seed: one.seed(seed & 0xFFFFFFFF)
        return lambda seed: one.set_state(type(bits)(seed).state)  # it seeds no other kind by itself
    if issubclass(type(one), random.Random):
        return one.seed
    if issubclass(type(one), torch.Generator):
        return functools.partial(_seed_of_torch, one)
    return None


def _seed_of_torch(one: torch.Generator, seed: int) -> None:
    """That of a device only where it may draw: to seed it asks the driver, which ends a process forked from one that
    has opened the device, as those of a loader are."""
    if one.device.type == "cpu" or get_worker_info() is None:
        one.manual_seed(seed & (2**63 - 1))

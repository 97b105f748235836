"""Finds the random generators that an object leads to, however it holds them.

Follows attributes, slots, containers, closures, default arguments, partials, bound methods and a user's classes. Of the
globals of a function it follows the names that the code uses. Does not enter tensors or the code of libraries.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

KINDS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator, torch.Generator)
"""Types of generators."""
_MOST = 100_000
"""Maximum number of objects that one search opens."""
_MANY = 256
"""Maximum number of generators that one search returns: each is seeded for every micro batch."""
_LONG, _FIRST = 1000, 64
"""A container with more than `_LONG` items holds samples: only its first ones are followed. One with more than `_FIRST`
generators has one for each sample: they are not returned."""
_CLOSED = ("logging", "torch._", "torch.distributed")
"""Modules whose objects lead into the inner parts of a library."""
_INSTALLED = ("site-packages", "dist-packages")
_PACKAGE = __name__.partition(".")[0]
_BUILT_IN = (dict, OrderedDict, list, tuple, set, frozenset)
_TOO_MANY = (
    "there are too many random generators to seed them all for every micro batch; keep one, or make "
    "one in __getitem__ from the sample's index"
)
Part = tuple[str, Any]
"""How an object is reached from the one before, and the object."""


def generators(holders: Iterable[Any]) -> tuple[list[Part], str]:
    """Return the generators that these objects lead to, and what is wrong with the search; '' where nothing is.

    Each comes with the shortest way to it, which is the same in every process, whatever else was found.
    """
    found: list[Part] = []
    problem = ""
    seen: dict[int, Any] = {}  # holds on to what was made here, so that no id is used twice
    level = [(str(number), one) for number, one in enumerate(holders)]
    while level:
        following: list[Part] = []
        for path, one in level:
            if id(one) in seen:
                continue
            seen[id(one)] = one
            if issubclass(type(one), KINDS):  # not isinstance, which asks a proxy what it stands for
                found.append((path, one))
            else:
                parts: list[Part] = []
                with contextlib.suppress(Exception):  # of a user's own class, whose methods may do anything
                    parts = [(path + how, part) for how, part in _parts(one) if _may_lead(part)]
                others = [(how, part) for how, part in parts if not issubclass(type(part), KINDS)]
                is_too_many = len(parts) - len(others) > _FIRST
                problem = problem or (_TOO_MANY if is_too_many else "")
                following += others if is_too_many else parts
            if len(found) == _MANY:
                return found, _TOO_MANY
            if len(seen) > _MOST:
                return found, f"the search for random generators ended after {_MOST} objects"
        level = following
    if len(dict(found)) < len(found):  # they have no order that other processes would know
        return found, "random generators in one set draw the same numbers; keep them in a list"
    return found, problem


def _may_lead(one: Any) -> bool:
    """Whether an object is a generator or may lead to one."""
    kind = type(one)
    if kind in _BUILT_IN and not gc.is_tracked(one):  # one of torch's is not tracked, nor is what holds it alone
        return any(map(_may_lead, itertools.islice(one.values() if isinstance(one, dict) else one, _LONG)))
    if kind in _BUILT_IN:
        return bool(one)
    return gc.is_tracked(one) or issubclass(kind, KINDS) or (kind is np.ndarray and one.dtype.hasobject)


def _parts(one: Any) -> Iterable[Part]:
    """Return what an object leads to."""
    kind = type(one)
    if kind is types.FunctionType:
        return _of_function(one)
    if issubclass(kind, type):
        return _of_class(one)
    if kind is types.ModuleType or issubclass(kind, torch.Tensor):
        return ()
    if kind.__module__.startswith(_CLOSED) and not issubclass(kind, nn.Module):  # fsdp makes classes of its own of them
        return ()
    if kind is np.ndarray:
        return _numbered(one.flat)
    parts = [*_held(one, kind), *_items(one, kind)]
    if not any(_may_lead(part) for _, part in parts):  # an iterator, say, or a method in C
        parts = [*_numbered(gc.get_referents(one))]
    return [*parts, ("()", kind)]


def _held(one: Any, kind: type) -> Iterator[Part]:
    """Yield attributes and slots, without calling the class's own code for them."""
    with contextlib.suppress(AttributeError):
        for name, value in dict(object.__getattribute__(one, "__dict__")).items():
            yield f".{name}", value
    for base in kind.__mro__:
        for name, slot in vars(base).items():
            if type(slot) is types.MemberDescriptorType:
                with contextlib.suppress(AttributeError):  # it was never set
                    yield f".{name}", slot.__get__(one)


def _items(one: Any, kind: type) -> Iterable[Part]:
    """The items of a container."""
    if issubclass(kind, dict):
        return _named(dict.items(one), dict.__len__(one))
    if issubclass(kind, (set, frozenset)):
        return [(f"{{{type(item).__qualname__}}}", item) for _, item in _numbered(kind.__iter__(one))]
    if issubclass(kind, (list, tuple, deque)):
        return _numbered(next(base for base in (list, tuple, deque) if issubclass(kind, base)).__iter__(one))
    return ()


def _named(items: Iterable[tuple[Any, Any]], length: int) -> Iterator[Part]:
    """Yield the values of a dict, and the keys that are not plain values."""
    for number, (key, value) in enumerate(itertools.islice(items, length if length <= _LONG else _FIRST)):
        name = repr(key) if type(key) in (str, int) else f"{number}"
        yield f"[{name}]", value
        yield f"[{name}!]", key


def _numbered(items: Iterable[Any]) -> list[Part]:
    found = [(f"[{number}]", item) for number, item in enumerate(itertools.islice(items, _LONG + 1))]
    return found if len(found) <= _LONG else found[:_FIRST]


def _of_class(kind: type) -> Iterator[Part]:
    """Yield the functions and values of a class and its base classes, except a library's."""
    for base in kind.__mro__:
        if not _is_library(base.__module__):
            yield from ((f".{name}", value) for name, value in dict(vars(base)).items())


def _of_function(one: types.FunctionType) -> Iterator[Part]:
    """Yield what a function holds, and the globals that it uses."""
    for name, cell in zip(one.__code__.co_freevars, one.__closure__ or (), strict=False):
        with contextlib.suppress(ValueError):  # it is not set yet
            yield f".{name}", cell.cell_contents
    yield from _numbered(one.__defaults__ or ())
    yield from _named((one.__kwdefaults__ or {}).items(), 0)
    yield from ((f".{name}", value) for name, value in vars(one).items())
    if _is_library(one.__module__):
        return
    names = dict.fromkeys(_names(one.__code__))
    spaces: list[tuple[str, dict[str, Any]]] = [("", one.__globals__)]
    spaces += [(f":{name}", vars(sys.modules[name])) for name in names if name in sys.modules]  # imported in it
    opened = set(names).intersection(sys.modules)
    while spaces:  # of a module, too, only what the code names
        path, space = spaces.pop(0)
        for name in names:
            value = space.get(name)
            if type(value) is not types.ModuleType:
                yield f"{path}:{name}", value
            elif value.__name__ not in opened:
                opened.add(value.__name__)
                spaces.append((f"{path}:{name}", vars(value)))


def _names(code: types.CodeType) -> Iterator[str]:
    """Return the names of globals and attributes that the code uses, also in functions inside it."""
    yield from code.co_names
    for inner in code.co_consts:
        if type(inner) is types.CodeType:
            yield from _names(inner)


@functools.cache
def _is_library(module: Any) -> bool:
    """Whether a module is Python's, this package's, or installed."""
    top = str(module).partition(".")[0]
    if top in sys.stdlib_module_names or top == _PACKAGE:
        return not str(module).startswith(f"{_PACKAGE}.tasks.")
    file = getattr(sys.modules.get(top), "__file__", None)
    return file is not None and not set(_INSTALLED).isdisjoint(Path(file).parts)

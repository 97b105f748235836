"""Fetches samples twice under one seed, in a separate process, to see whether a run would be exact.

What draws from the clock, the operating system or an own state gives other numbers the second time. It would do so
after a resume too, or with other numbers of workers and ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .aside import aside
from .fetch import Items, is_indexed_at_once
from .order import order
from .plan import MicroBatch
from .seeding import search

_SAMPLES = 8
"""Maximum number of samples of a set that are fetched."""
_PATIENCE = 4.0
"""Seconds to wait for the answer."""
_SLOW = 1.0
"""Seconds above which the first samples are not fetched again."""
_REMEDY = "draw from random, NumPy or torch, or seed by the sample's index"
_DEEP = 8
"""Maximum depth of containers that are compared."""


def why_not_exact(
    sets: Mapping[str, Any], *, collate: Callable[[list[Any]], Any] | None, made_by: Callable[..., Any], batch: int,
    seed: int,
) -> list[str]:  # fmt: skip
    """Return why a run with these datasets would not be exact, as far as a look at a few samples shows.

    The samples are fetched in a fork, so nothing of this reaches the run. What is too slow is not looked at.

    Args:
        sets: by the names that messages give them.
        batch: samples of a micro batch.
    """
    sets = {name: one for name, one in sets.items() if not is_indexed_at_once(one, collate)}
    if not sets:
        return []

    def look() -> list[str]:
        torch.set_num_threads(1)  # as a loader's worker
        found = [line for name in sets if (line := _looked_at(name, sets[name], collate, made_by, batch, seed))]
        return list(dict.fromkeys(found))

    return aside(look, _PATIENCE)[0] or []


def _looked_at(
    name: str, dataset: Any, collate: Callable[[list[Any]], Any] | None, made_by: Callable[..., Any], batch: int,
    seed: int,
) -> str:  # fmt: skip
    """Return why what is fetched of a set would not be exact; '' if nothing shows it."""
    count = min(batch, _SAMPLES, len(dataset))
    micro = MicroBatch(step=0, number=0, indices=order(seed, 0, np.arange(count), len(dataset)), seed=seed)
    items, begun = Items(dataset, collate, False, made_by, name), time.monotonic()
    first = items.gather(micro)
    if first[1] or time.monotonic() - begun > _SLOW:
        return ""
    differs_at, problem = difference(first[0], items.gather(micro)[0]), search(dataset, collate, made_by)[1]
    if differs_at is None:
        return problem
    where = f"the first samples of the {name} set differ"
    for index, *pair in zip(micro.indices.tolist(), items.items(micro)[0], items.items(micro)[0], strict=False):
        difference_at = difference(*pair)
        if difference_at is not None:
            where, differs_at = f"sample {index} of the {name} set differs", difference_at
            break
    return (
        f"{where}{f' in {differs_at}' if differs_at else ''} when fetched twice under one seed, so a resume, or "
        f"other numbers of workers and ranks, give other results; {problem or _REMEDY}"
    )


def difference(one: Any, other: Any, depth: int = _DEEP) -> str | None:
    """Return the place where two samples differ in a bit, '' for the whole; None if they do not, or if that is not
    known."""
    if type(one) is not type(other):
        return ""
    if one is other or not depth:
        return None
    if isinstance(one, np.ndarray) and one.dtype.hasobject:
        return difference(one.tolist(), other.tolist(), depth)
    if isinstance(one, (torch.Tensor, np.ndarray)):
        return None if _bits(one) == _bits(other) else ""
    if isinstance(one, Mapping):
        return "" if one.keys() != other.keys() else _first([(f"[{k!r}]", one[k], other[k]) for k in one], depth)
    if isinstance(one, (list, tuple)):
        pairs = enumerate(zip(one, other, strict=False))
        return "" if len(one) != len(other) else _first([(f"[{n}]", *pair) for n, pair in pairs], depth)
    if isinstance(one, (str, bytes, int, float, complex, np.generic)):
        is_nan = isinstance(one, float) and math.isnan(one) and math.isnan(other)
        return None if one == other or is_nan else ""
    if hasattr(one, "tobytes"):  # a picture
        return None if one.tobytes() == other.tobytes() else ""
    held, others = getattr(one, "__dict__", {}), getattr(other, "__dict__", {})
    return _first([(f".{name}", held[name], others[name]) for name in held if name in others], depth)


def _first(parts: Sequence[tuple[str, Any, Any]], depth: int) -> str | None:
    found = ((how, difference(one, other, depth - 1)) for how, one, other in parts)
    return next((f"{how}{place}" for how, place in found if place is not None), None)


def _bits(values: Any) -> Any:
    """Return what is equal for two tensors or arrays with the same bits."""
    if isinstance(values, np.ndarray):
        return (values.shape, str(values.dtype), values.tobytes())
    if values.layout != torch.strided:
        return (values.shape, str(values.dtype))
    bits = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return (values.shape, str(values.dtype), bits.numpy().tobytes())

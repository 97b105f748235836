"""Batches on their way: made ahead by a thread in order, with errors at their places; of the kinds that they were."""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from tests.waiting import eventually
from train.data.to_device import ahead, mapped, pinned


def test_the_order_is_kept_and_the_thread_begins_before_it() -> None:
    began: list[str] = []
    made = ahead(iter(range(50)), lambda item: item * 2, lambda: began.append(threading.current_thread().name))
    assert list(made) == [2 * item for item in range(50)]
    assert began == ["pin"]


def test_an_error_comes_at_its_place() -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise OSError("a worker is gone")

    made = ahead(items(), lambda item: item)
    assert [next(made), next(made)] == [1, 2]
    with pytest.raises(OSError, match="a worker is gone"):
        next(made)


def test_an_error_of_the_thread_s_beginning_is_raised_too() -> None:
    def begin() -> None:
        raise RuntimeError("no such device")

    with pytest.raises(RuntimeError, match="no such device"):
        next(ahead(iter([1]), lambda item: item, begin))


def test_no_more_is_made_than_a_few_ahead_and_nothing_once_nobody_asks() -> None:
    made: list[int] = []
    items = ahead(iter(range(1000)), lambda item: made.append(item) or item)
    assert next(items) == 0
    time.sleep(0.3)
    assert len(made) <= 5
    items.close()  # type: ignore[attr-defined]
    eventually("the thread has ended", lambda: not any(thread.name == "pin" for thread in threading.enumerate()), 10)


def test_what_is_on_a_gpu_already_is_not_pinned() -> None:
    """Which torch refuses. A fake tensor is on a GPU that is not there."""
    with FakeTensorMode():
        there = torch.empty(3, device="cuda")
        packed = PackedSequence(there, torch.ones(3, dtype=torch.int64))
        given = {"x": there, "more": (packed, "text")}
        _, batch, _ = next(pinned(iter([(0, given, [])]), torch.device("cuda"), has_workers=False))
    assert batch["x"] is there and batch["more"][0] is packed


def test_on_the_cpu_nothing_is_done() -> None:
    items = iter([1, 2])
    assert pinned(items, torch.device("cpu"), has_workers=True) is items


class Pair(NamedTuple):
    one: torch.Tensor
    other: Any


@dataclasses.dataclass
class Own:
    """A batch that knows how to be pinned."""

    times: int = 0

    def pin_memory(self) -> Own:
        return Own(self.times + 1)


def _kinds(value: Any) -> Any:
    """The types in a batch, all the way down."""
    if isinstance(value, dict):
        return type(value), {key: _kinds(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [_kinds(inner) for inner in value]
    return type(value)


def test_a_batch_is_of_the_same_kinds_as_without_pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor, _: Any = None) -> torch.Tensor:
        found.append(tensor)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    points = torch.ones(2)
    assert mapped(collections.Counter("aab"), lambda one: one) == {"a": 2, "b": 1}
    counted = collections.defaultdict(list, {"a": [points, (points,)]})
    batch = (
        points, (points, [points, (1, "x", None)]), Pair(points, (points,)), counted, range(3), np.zeros(2), Own(),
        pack_sequence([points]), collections.deque([1]),
    )  # fmt: skip
    given = (0, collections.UserDict(a=[points]), [])
    ((_, moved, _),) = pinned(iter([given]), torch.device("cuda"), has_workers=False)
    assert type(moved) is collections.UserDict and found.pop() is points
    (same,) = pinned(iter([(0, batch, [])]), torch.device("cuda"), has_workers=False)
    assert _kinds(same) == _kinds((0, batch, []))
    assert sum(tensor is points for tensor in found) == 7 and same[1][6].times == 1
    assert same[1][3]["new"] == []

"""Which tensors are copied beside what a GPU computes, and how far ahead; tests/gpu has what comes of it on one."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from train.data.copies import LEAST, Copies
from train.data.loader import prepared

HERE = torch.device("cpu")
"""In place of a GPU: what is copied there stays where it is."""


class Gpu:
    """Two streams, of which the test says how far the one that computes has come."""

    def __init__(self) -> None:
        self.said: list[str] = []
        """What was asked of them, in order."""
        self.asked = self.made = 0
        """Of what is computed, in steps."""
        self.current = "computing"
        self.held = collections.deque[int]()
        """Of each tensor that was copied ahead, the step that computes with it; who asks for memory next gets those
        back that have been made."""
        self.most = 0

    def stream(self, name: str) -> Any:
        return Stream(self, name)

    def recorded(self) -> None:
        while self.held and self.held[0] <= self.made:
            self.held.popleft()
        self.held.append(self.asked + 1)
        self.most = max(self.most, len(self.held))


class Stream:
    def __init__(self, gpu: Gpu, name: str) -> None:
        self._gpu, self.name = gpu, name

    def wait_stream(self, other: Stream) -> None:
        self._gpu.said.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> Any:
        gpu, at = self._gpu, self._gpu.asked

        class Event:
            def query(self) -> bool:
                return gpu.made >= at

        return Event()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    found = Gpu()

    @contextlib.contextmanager
    def stream(one: Stream) -> Iterator[None]:
        found.current, before = one.name, found.current
        yield
        found.current = before

    def to(value: Tensor, *_: Any, **how: Any) -> Tensor:
        found.said.append(f"{found.current} copies" + (", which waits" if not how.get("non_blocking") else ""))
        return value

    def record_stream(_: Tensor, one: Stream) -> None:
        found.said.append(f"kept from others until {one.name} has used it")
        found.recorded()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(found, "copying"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(found, found.current))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    return found


LARGE, SMALL = torch.zeros(LEAST, dtype=torch.uint8), torch.zeros(LEAST - 1, dtype=torch.uint8)


def test_a_large_tensor_is_copied_on_a_stream_of_its_own_and_used_when_it_is_there(gpu: Gpu) -> None:
    prepared([LARGE, SMALL], 0, HERE, None, False, None, copies=Copies(HERE))
    assert gpu.said == ["copying copies", "computing waits for copying", "kept from others until computing has used it"]


class Own(Tensor):
    """Some library's kind of tensor."""


@pytest.mark.parametrize(
    "value",
    [SMALL, LARGE.as_subclass(Own), torch.zeros(LEAST, device="meta"), torch.zeros(1 << 11, 1 << 11).to_sparse()],
)
def test_others_are_copied_as_they_were(value: Tensor) -> None:
    copies = Copies(HERE)
    copies.begin()
    assert not copies.takes(value)


@pytest.mark.parametrize("micros", [1, 2, 5])
def test_no_more_than_one_batch_is_copied_ahead_of_what_is_computed(gpu: Gpu, micros: int) -> None:
    copies, ahead = Copies(HERE), []
    for step in range(1, 9):
        for _ in range(micros):
            copies.begin()
            ahead.append(copies.takes(LARGE))
            if ahead[-1]:
                copies.copy(LARGE)
            gpu.asked += 1  # a forward and backward
        gpu.made = (step - 1) * micros  # the host comes to its next step when the one before this has been made
    assert gpu.most == 2  # one that is computed with, and one
    assert all(ahead) if micros == 1 else any(ahead[micros:])

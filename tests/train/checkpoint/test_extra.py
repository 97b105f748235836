"""The state of a task's objects: taken apart for copies, and put together again as it was."""

from __future__ import annotations

import collections
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from train.checkpoint.extra import OBJECTS, Extra, _together, packed

pytestmark = pytest.mark.never_forgiven

CPU = torch.device("cpu")


class Holder:
    """Has all kinds of things in its state, and takes them as they come."""

    def __init__(self) -> None:
        shared = torch.arange(6.0).reshape(2, 3)
        self.held: dict[str, Any] = {
            "nested": [torch.ones(3), {"deep": (torch.zeros(2, dtype=torch.int64), "text", None)}],
            "weight": nn.Parameter(torch.randn(2)), "trained": torch.ones(1, requires_grad=True),
            "one": shared, "other": shared, "turned": shared.t(), "empty": torch.zeros(0, 4),
            "half": torch.ones(3, dtype=torch.bfloat16), "count": 7,
            "order": collections.OrderedDict(b=torch.tensor(1.5), a=2),
            "sparse": torch.eye(2).to_sparse(),
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return self.held

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state


def check(found: dict[str, Any]) -> None:
    wanted = Holder().held
    assert found.keys() == wanted.keys() and found["count"] == 7
    assert found["nested"][1]["deep"][1:] == ("text", None) and [*found["order"]] == ["b", "a"]
    assert type(found["weight"]) is nn.Parameter and found["trained"].requires_grad
    assert found["one"] is found["other"] and not found["one"].requires_grad
    assert found["turned"].tolist() == [[0, 3], [1, 4], [2, 5]] and found["empty"].shape == (0, 4)
    assert found["half"].dtype == torch.bfloat16 and found["sparse"].is_sparse


def test_it_is_put_together_as_it_was_from_memory_and_from_the_disk() -> None:
    state = Extra(objects={"it": Holder()}).state()
    tensors, rest = state[OBJECTS]
    assert len(tensors) == 9 and len(rest) < 4000
    for held in (state, packed(state)):
        one = Holder()
        Extra(objects={"it": one}).load(held, CPU)
        check(one.held)


def test_tensors_of_a_gpu_return_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a device that has no memory in the place of the GPU's."""
    meta = torch.device("meta")
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda tensor: tensor.shape == (3,)))
    extra = Extra(objects={"it": Holder()})
    state = extra.state()
    monkeypatch.undo()
    held = torch.load(io.BytesIO(packed(state)[OBJECTS]), weights_only=True)
    assert held[1] == [0, 7]
    for found in (state, packed(state)):
        one = Holder()
        Extra(objects={"it": one}).load(found, meta)
        on_gpu = [name for name, value in one.held.items() if isinstance(value, Tensor) and value.is_meta]
        assert on_gpu == ["half"] and one.held["nested"][0].is_meta


def test_what_an_evaluation_changes_is_undone() -> None:
    one = Holder()
    extra = Extra(objects={"it": one})
    with extra.unchanged(CPU):
        one.held["one"].add_(1)
        one.held["nested"][1]["deep"][0].add_(1)
        one.held["count"] += 1
        one.held["nested"].append(1)
    check(one.held)
    assert one.held["one"].tolist() == [[0, 1, 2], [3, 4, 5]] and len(one.held["nested"]) == 2


def test_no_object_no_state() -> None:
    assert Extra().state() == packed({}) == {}
    assert _together([], b"\x80\x04N.", None) is None

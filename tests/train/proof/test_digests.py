"""Digests of a state: what is equal, and what is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from train.checkpoint.digests import digest_of


@pytest.mark.parametrize(("one", "other"), [
    (torch.zeros(3), torch.tensor([0.0, 0.0, 1.0])),
    (torch.zeros(4), torch.zeros(2, 2)),
    (np.zeros(3), np.array([0.0, 0.0, 1.0])),
    (np.zeros(4), np.zeros((2, 2))),
    (np.zeros(2, np.float32), np.zeros(1, np.float64)),
    (np.int64(1), np.int64(2)),
    ({1, 2}, {1, 3}),
    (bytearray(b"a"), bytearray(b"b")),
    ([1, 2], [2, 1]),
    (0, False),
])  # fmt: skip
def test_whatever_a_checkpoint_holds_counts(one: Any, other: Any) -> None:
    found = [digest_of({"state": [value]}) for value in (one, other)]
    assert found[0] != found[1] and found[0] == digest_of({"state": [one]})


def test_the_order_of_keys_and_items_of_a_set_does_not_count() -> None:
    assert digest_of({"a": 1, "b": {"x", "y"}}) == digest_of({"b": {"y", "x"}, "a": 1})

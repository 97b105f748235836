"""Nodes of a run compare what they train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from train.nodes.node_checks import SHARED, difference, sees_folder
from train.run import folders

SAME = {"torch": "2.7.1", "python": "3.11", "code": "abc", "task": "t", "data": "d", "config": {"seed": 0}}


def hello(node: int, **more: Any) -> dict[str, Any]:
    given = {"run": "a", "node": node, "nproc": 1, "least": 2, "most": 2, "host": f"host{node}", "same": SAME}
    return given | more


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"run": "b"}, "give each run its own port"),
        ({"least": 1}, "--nnodes 1:2, but node 0 (host0) with 2"),
        ({"same": SAME | {"torch": "2.8"}}, "another version of torch than node 0 (host0): 2.8 instead of 2.7.1"),
        ({"same": SAME | {"task": "u"}}, "another task file"),
        ({"same": SAME | {"config": {"seed": 1}}}, "seed is 1, not 0"),
        ({"same": SAME | {"config": {"seed": 0, "precision": "tf32"}}}, "set it with --precision on all machines"),
    ],
)
def test_a_node_that_differs_is_told_in_what(more: dict[str, Any], words: str) -> None:
    assert words in difference(hello(0), hello(1, **more))
    assert difference(hello(0), hello(1)) == ""


def test_copies_of_a_model_are_of_the_same_size_on_all_nodes() -> None:
    same = SAME | {"config": {"parallel.shard_size": 2}}
    assert "multiples of 2" in difference(hello(0, same=same, nproc=3), hello(1, same=same, nproc=4))
    assert difference(hello(0, same=same, nproc=2), hello(1, same=same, nproc=4)) == ""


def test_a_folder_is_shared_where_what_node_0_has_written_is_seen(tmp_path: Path) -> None:
    zero = folders.create(tmp_path, "a", files={}, record={})
    one = folders.create(folders.of_node(tmp_path, 1), "a", files={}, record={})
    assert not sees_folder(one.folder, "x")
    (zero.folder / SHARED).write_text("x")
    assert sees_folder(one.folder, "x") and not sees_folder(one.folder, "y")  # a copy of an earlier one
    assert not sees_folder(zero.folder, "x")

"""Other data are told from the same data that were copied or moved; a difference has a name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from train.data import fingerprint
from train.data.fingerprint import differences, of_sets, recorded
from train.errors import Refused

pytestmark = pytest.mark.never_forgiven


class Held(Dataset[Any]):
    """A user's own data set: items in a list or an array."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)


def listed(root: Path) -> Held:
    return Held([(path, len(path.parent.name)) for path in sorted(root.glob("*/*"))])


def pets(folder: Path) -> Path:
    for kind in ("cats", "hamsters"):
        (folder / kind).mkdir(parents=True)
        for number in range(4):
            (folder / kind / f"{kind}{number}.png").write_bytes(bytes(10 + number))
    return folder


def compared(then: Any, now: Any, own: tuple[Any, Any] = (None, None)) -> list[str]:
    return differences(
        of_sets("", own[0], train_set=then, eval_sets=None), of_sets("", own[1], train_set=now, eval_sets=None)
    )


def changed(root: Path, change: Callable[[Path], Any]) -> list[str]:
    then = of_sets(str(root), None, train_set=listed(pets(root)), eval_sets={})
    change(root)
    return differences(then, of_sets(str(root), None, train_set=listed(root), eval_sets=None))


CHANGES: list[tuple[Callable[[Path], Any], list[str]]] = [
    (lambda root: (root / "cats/cats1.png").unlink(), ["cats/cats1.png is gone"]),
    (lambda root: (root / "cats/cats0.png").write_bytes(bytes(11)), ["cats/cats0.png has 11 bytes and had 10"]),
    (lambda root: (root / "cats/cats1.png").rename(root / "hamsters/cats1.png"),
     ["cats/cats1.png is gone", "hamsters/cats1.png is new"]),
]  # fmt: skip


def test_hidden_files_among_the_data_are_known(tmp_path: Path) -> None:
    (pets(tmp_path / "pets") / "cats").rename(tmp_path / "pets" / ".cats")
    seen = Held(sorted((tmp_path / "pets").rglob("*.png")))
    then = of_sets(str(tmp_path / "pets"), None, train_set=seen, eval_sets={})
    assert fingerprint.hidden_in(then) == [f".cats/cats{number}.png" for number in range(4)]


@pytest.mark.parametrize(("change", "said"), CHANGES)
def test_a_change_among_files_is_named(
    tmp_path: Path, change: Callable[[Path], Any], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert changed(tmp_path / "few", change) == said
    monkeypatch.setattr(fingerprint, "LISTED", 3)
    assert changed(tmp_path / "many", change) == ["the files have other names or sizes"]


def test_times_and_places_do_not_matter(tmp_path: Path) -> None:
    root = pets(tmp_path / "pets")
    then = of_sets(str(root), None, train_set=listed(root), eval_sets={})
    for path in root.rglob("*"):
        os.utime(path, (1, 1))
    shutil.copytree(root, tmp_path / "else" / "where")
    there = tmp_path / "else/where"
    for now in (
        of_sets(str(there), None, train_set=listed(there), eval_sets=None),
        of_sets("", None, train_set=listed(root), eval_sets=None),
    ):
        assert differences(then, now) == []


def test_another_order_of_the_same_files_is_another_data_set(tmp_path: Path) -> None:
    there = listed(pets(tmp_path / "pets"))
    assert "another order" in compared(there, Held(there.items[::-1]))[0]


def test_one_changed_value_is_noticed_wherever_a_data_set_holds_it() -> None:
    points, labels = torch.randn(5000, 7), torch.arange(5000) % 3
    texts = [word * 100 for word in ("good ", "bad ")]  # too long for names of files

    def joined(second: torch.Tensor, last: int = 4500) -> Any:
        parts = [TensorDataset(points[:100], labels[:100]), TensorDataset(second, labels)]
        return Subset(ConcatDataset(parts), [*range(4000), last])

    def with_other(values: torch.Tensor) -> torch.Tensor:
        other = values.clone()
        other[7] = other[8]
        return other

    def pairs(values: torch.Tensor) -> list[Any]:
        return [(row, int(label), None) for row, label in zip(values[:50], labels, strict=False)]

    same = joined(points)
    assert compared(same, joined(points.clone())) == []
    assert compared(same, joined(with_other(points))) == ["tensors of the training set.dataset.datasets[1] has changed"]
    assert compared(same, joined(points, 4501)) == ["indices of the training set has changed"]
    for make in (TensorDataset, pairs, lambda values: values.numpy(), lambda values: Held(values.T.T.bfloat16())):
        assert compared(make(points), make(points.clone())) == []
        assert compared(make(points), make(with_other(points)))
    assert compared(Held(texts), Held(list(texts))) == []
    assert compared(Held(texts), Held([*texts[:1], "ugly"]))
    assert "4999 samples now and had 5000" in compared(TensorDataset(points), TensorDataset(points[1:]))[0]


def test_every_evaluation_set_is_compared_by_its_name() -> None:
    train, one, other = range(3), TensorDataset(torch.zeros(5)), TensorDataset(torch.ones(5))
    then = of_sets("", None, train_set=train, eval_sets={"val": one, "test": one})
    assert differences(then, of_sets("", None, train_set=train, eval_sets={"val": one, "test": one})) == []
    for sets, words in (
        ({"val": one, "test": other}, ["tensors of the evaluation set test has changed"]),
        ({"val": one}, ["the evaluation set test is gone"]),
        ({"val": one, "test": one, "more": other}, ["the evaluation set more is new"]),
    ):
        assert differences(then, of_sets("", None, train_set=train, eval_sets=sets)) == words


def test_a_large_array_on_the_disk_is_looked_at_in_places(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 255, (80, 1 << 20), dtype=np.uint8)
    np.save(tmp_path / "a.npy", rows)
    rows[40] = 0
    np.save(tmp_path / "b.npy", rows)
    a, b = (Held(np.load(tmp_path / name, mmap_mode="r")) for name in ("a.npy", "b.npy"))
    assert compared(a, Held(a.items)) == [] and compared(a, b)


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        ("v1", "v1", []),
        ("v1", "v2", ['fingerprint() gives "v2" and gave "v1"']),
        ({"rows": 3, 2: "x"}, {"rows": 4, 2: "x"}, ["fingerprint() gives 4 for 'rows' and gave 3"]),
        ({"rows": 3}, {"rows": 3, "y": None}, ["fingerprint() gives null for 'y' and gave nothing"]),
    ],
)
def test_a_tasks_own_fingerprint_is_compared_part_by_part(then: Any, now: Any, said: list[str]) -> None:
    assert compared(range(3), range(3), own=(then, now)) == said
    assert len(json.dumps(of_sets("", "x" * 20000, train_set=range(3), eval_sets=None))) < 1000


def test_a_damaged_one_is_refused_and_a_run_without_has_none(tmp_path: Path) -> None:
    assert recorded(tmp_path) is None
    found = of_sets("", None, train_set=[1, 2], eval_sets={})
    (tmp_path / "data.json").write_text(json.dumps(found))
    assert recorded(tmp_path) == found
    for text in (json.dumps(found)[:50], "[]", '{"facts": {}}'):
        (tmp_path / "data.json").write_text(text)
        with pytest.raises(Refused, match="damaged"):
            recorded(tmp_path)

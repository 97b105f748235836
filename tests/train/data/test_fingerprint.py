"""Other data are told from the same data that were copied, moved or computed elsewhere; a difference has a name."""

from __future__ import annotations

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
from train.data.fingerprint import Files, differences, of_sets
from train.errors import Refused


class Listed(Dataset[Any]):
    """A user's own data set: pairs of file and label."""

    def __init__(self, root: Path) -> None:
        self.items = [(path, len(path.parent.name)) for path in sorted(root.glob("*/*"))]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def pets(folder: Path) -> Path:
    for kind in ("cats", "hamsters"):
        (folder / kind).mkdir(parents=True)
        for number in range(4):
            (folder / kind / f"{kind}{number}.png").write_bytes(bytes(10 + number))
    return folder


def compared(folder: Path, then: Any, now: Any, root: str = "", own: tuple[Any, Any] = (None, None)) -> list[str]:
    folder.mkdir(exist_ok=True)
    for name, content in of_sets(root, own[0], then, None).files().items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return differences(folder, of_sets(root, own[1], now, None))


def changed(folder: Path, change: Callable[[Path], Any], listed: int | None = None) -> list[str]:
    root = pets(folder / "pets")
    then = of_sets(str(root), None, Listed(root), None)
    if listed is not None:
        fingerprint.LISTED, before = listed, fingerprint.LISTED
    (folder / "run").mkdir()
    for name, content in then.files().items():
        (folder / "run" / name).write_bytes(content.encode() if isinstance(content, str) else content)
    if listed is not None:
        fingerprint.LISTED = before
    change(root)
    return differences(folder / "run", of_sets(str(root), None, Listed(root), None))


CHANGES: list[tuple[Callable[[Path], Any], str, str]] = [
    (lambda root: (root / "cats/cats1.png").rename(root / "hamsters/cats1.png"),
     "cats/cats1.png is now hamsters/cats1.png", "cats has 3 files and had 4"),
    (lambda root: (root / "cats/cats1.png").unlink(), "cats/cats1.png is gone", "cats has 3 files"),
    (lambda root: shutil.copytree(root / "cats", root / "birds"),
     "the folder birds is new (files: 4)", "the folder birds is new"),
    (lambda root: shutil.rmtree(root / "cats"), "the folder cats is gone", "the folder cats is gone"),
    (lambda root: (root / "cats/cats0.png").write_bytes(bytes(11)), "cats/cats0.png has 11 bytes and had 10", "bytes"),
    (lambda root: (root / "cats/cats1.png").rename(root / "cats/tom.png"), "cats/cats1.png is gone", "other files"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "by_file", "by_folder"), CHANGES)
def test_a_change_among_files_is_named(
    tmp_path: Path, change: Callable[[Path], Any], by_file: str, by_folder: str
) -> None:
    assert by_file in changed(tmp_path / "few", change)[0]
    said = changed(tmp_path / "many", change, listed=0)  # of more files than are listed
    assert any(by_folder in line for line in said)
    assert not (tmp_path / "many/run/data.files.gz").exists()


def test_times_and_places_do_not_matter(tmp_path: Path) -> None:
    def touch(root: Path) -> None:
        for path in root.rglob("*"):
            os.utime(path, (1, 1))

    assert changed(tmp_path, touch) == []
    root = tmp_path / "pets"
    shutil.copytree(root, tmp_path / "else" / "where")
    moved = of_sets(str(tmp_path / "else/where"), None, Listed(tmp_path / "else/where"), None)
    assert differences(tmp_path / "run", moved) == []
    without_root = of_sets("", None, Listed(root), None)
    assert differences(tmp_path / "run", without_root) == []


def test_another_order_of_the_same_files_is_another_data_set(tmp_path: Path) -> None:
    there = Listed(pets(tmp_path / "pets"))
    other = Listed(tmp_path / "pets")
    other.items.reverse()
    assert "another order" in compared(tmp_path / "run", there, other, str(tmp_path / "pets"))[0]


def arrays() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(5000, 7, generator=generator), torch.arange(5000) % 3


def test_one_changed_number_is_noticed_and_the_last_bits_of_a_computation_are_not(tmp_path: Path) -> None:
    points, labels = arrays()
    same = TensorDataset(points, labels)
    assert compared(tmp_path / "run", same, TensorDataset(points.clone(), labels.clone())) == []
    bits = points * (1 + 1e-7 * torch.sign(torch.sin(points * 1e3)))
    assert not torch.equal(bits, points)
    assert compared(tmp_path / "run", same, TensorDataset(bits, labels)) == []
    for place in ((0, 0), (4999, 6), (2500, 3)):
        other = points.clone()
        other[place] += 0.5
        assert compared(tmp_path / "run", same, TensorDataset(other, labels)) == [
            "tensors[0] of the training set: not as it was"
        ]
    swapped = points.clone()
    swapped[[10, 20]] = points[[20, 10]]
    assert compared(tmp_path / "run", same, TensorDataset(swapped, labels))
    label = labels.clone()
    label[7] = 0
    assert compared(tmp_path / "run", same, TensorDataset(points, label)) == [
        "tensors[1] of the training set: not as it was"
    ]
    holes = points.clone()
    holes[3, 3] = torch.nan
    assert compared(tmp_path / "run", same, TensorDataset(holes, labels))
    assert compared(tmp_path / "run", TensorDataset(holes), TensorDataset(holes.clone())) == []
    assert "4999 samples now and had 5000" in compared(tmp_path / "run", same, TensorDataset(points[1:], labels[1:]))[0]


def test_it_looks_through_subsets_and_what_is_joined(tmp_path: Path) -> None:
    points, labels = arrays()
    other = points.clone()
    other[4000, 0] = 9

    def joined(second: torch.Tensor, last: int = 4500) -> Any:
        parts = [TensorDataset(points[:100], labels[:100]), TensorDataset(second, labels)]
        return Subset(ConcatDataset(parts), [*range(4000), last])

    assert compared(tmp_path / "run", joined(points), joined(points.clone())) == []
    assert compared(tmp_path / "run", joined(points), joined(other))
    assert "indices" in compared(tmp_path / "run", joined(points), joined(points, 4501))[0]
    pairs = [([float(row.sum())], int(label)) for row, label in zip(points, labels, strict=True)]
    assert compared(tmp_path / "run", pairs, list(pairs)) == []
    assert compared(tmp_path / "run", pairs, [*pairs[:-1], ([1.0], 1)])


def test_a_large_array_on_the_disk_is_looked_at_in_places(tmp_path: Path) -> None:
    class Mapped(Dataset[Any]):
        def __init__(self, path: Path) -> None:
            self.rows = np.load(path, mmap_mode="r")

        def __len__(self) -> int:
            return len(self.rows)

    rows = np.random.default_rng(0).integers(0, 255, (80, 1 << 20), dtype=np.uint8)
    np.save(tmp_path / "a.npy", rows)
    rows[40] = 0
    np.save(tmp_path / "b.npy", rows)
    assert compared(tmp_path / "run", Mapped(tmp_path / "a.npy"), Mapped(tmp_path / "a.npy")) == []
    assert compared(tmp_path / "run", Mapped(tmp_path / "a.npy"), Mapped(tmp_path / "b.npy"))


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        ("v1", "v1", []),
        ("v1", "v2", ['fingerprint() gives "v2" and gave "v1"']),
        ({"rows": 3, "x": [1]}, {"rows": 4, "x": [1]}, ["fingerprint() gives 4 for 'rows' and gave 3"]),
        ({"rows": 3}, {"rows": 3, "y": None}, ["fingerprint() gives null for 'y' and gave nothing"]),
        ({"a": "x" * 20000, "b": 1}, {"a": "x" * 20000, "b": 2}, ["fingerprint() gives another 'b'"]),
        (["x" * 20000], ["x" * 20001], ["fingerprint() gives something else"]),
    ],
)
def test_a_tasks_own_fingerprint_is_compared_part_by_part(tmp_path: Path, then: Any, now: Any, said: list[str]) -> None:
    assert compared(tmp_path / "run", range(3), range(3), own=(then, now)) == said


def test_it_stays_small_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    found = fingerprint.Fingerprint({}, {f"train/n{i % 1000:08}/n{i % 1000:08}_{i}.JPEG": i for i in range(300_000)})
    files = found.files()
    assert files.keys() == {"data.json"} and len(files["data.json"]) < 200_000
    (tmp_path / "data.json").write_text(str(files["data.json"])[:100])
    with pytest.raises(Refused, match="damaged"):
        differences(tmp_path, found)
    assert differences(tmp_path / "older", found) == []  # a run folder from before there were fingerprints


def test_files_that_a_task_names_itself_are_compared_as_files(tmp_path: Path) -> None:
    root = pets(tmp_path / "pets")
    then = Files(root, sorted(root.glob("*/*")))
    now = Files(root, sorted(root.glob("*/*"))[1:])
    assert compared(tmp_path / "run", range(3), range(3), own=(then, now)) == ["cats/cats0.png is gone"]


class Texts(Dataset[str]):
    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> str:
        return self.texts[index]


def test_long_texts_are_no_names_of_files(tmp_path: Path) -> None:
    texts = [word * 100 for word in ("good ", "bad ")]
    assert compared(tmp_path, Texts(texts), Texts(list(texts))) == []
    assert compared(tmp_path, Texts(texts), Texts([*texts[:1], "ugly"])) != []


def test_what_has_no_order_or_no_numpy_is_looked_at_all_the_same(tmp_path: Path) -> None:
    def mixed(last: int) -> Any:
        made = [1, [2, last]]
        return made, TensorDataset(torch.tensor([1.0, last]).to(torch.float8_e4m3fn))

    for number in (0, 1):
        assert compared(tmp_path / f"same{number}", mixed(3)[number], mixed(3)[number]) == []
        (said,) = compared(tmp_path / f"other{number}", mixed(3)[number], mixed(4)[number])
        assert "not as it was" in said
    data: list[int] = [1]
    assert compared(tmp_path / "own", data, data, own=({1: "x", "a": 2}, {1: "x", "a": 2})) == []
    (said,) = compared(tmp_path / "own", data, data, own=({1: "x", "a": 2}, {1: "y", "a": 2}))
    assert "'1'" in said

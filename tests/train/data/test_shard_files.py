"""Tar and parquet shards by number: what is read, what is refused, and runs that are the same on any ranks."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import train
from tests.tasks import TASKS
from train.data import shards as module
from train.data.fetch import file_of
from train.errors import Refused

pytestmark = [pytest.mark.never_forgiven, pytest.mark.turns]

ROWS = [{"point": [n / 7, n % 3 - 1.0, 0.5, -n / 9, 1.0, n % 2], "label": n % 4} for n in range(60)]


def write_tar(path: Path, files: Iterable[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def write_sets(folder: Path, kind: str) -> None:
    """train-0 to train-2 and val-0, 15 samples each."""
    for number, name in enumerate(("train-0", "train-1", "train-2", "val-0")):
        rows = ROWS[15 * number : 15 * number + 15]
        if kind == "tar":
            write_tar(
                folder / f"{name}.tar", [(f"{n:03}.json", json.dumps(row).encode()) for n, row in enumerate(rows)]
            )
        else:
            pyarrow = pytest.importorskip("pyarrow", reason="the station's image has no room for it")
            parquet = pytest.importorskip("pyarrow.parquet")
            parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{name}.parquet", row_group_size=4)


def test_files_of_a_tar_are_samples_by_their_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = "deep/" * 40 + "name"  # beyond what a plain header holds
    write_tar(
        tmp_path / "b.tar",
        [("one.jpg", b"x" * 70_000), ("one.cls", b"3"), (f"{long}.seg.png", b""), (".hidden", b"?"), ("readme", b"?")],
    )
    write_tar(tmp_path / "a.tar", [("d/zero.txt", b"0"), ("./d/.git/x.txt", b"?"), ("@eaDir/zero.txt", b"?")])
    (tmp_path / "._a.tar").write_bytes(b"of another system")
    found = train.shards(tmp_path)
    assert len(found) == 3 and found[0] == {"__key__": "d/zero", "txt": b"0"}
    assert found[1] == {"__key__": "one", "jpg": b"x" * 70_000, "cls": b"3"}
    assert found[-1] == {"__key__": long, "seg.png": b""}
    assert len(list(found)) == 3, "a loop over a data set ends by IndexError"
    assert file_of(found, 1) == f"{tmp_path / 'b.tar'}: one"
    assert train.shards(f"{tmp_path}/b*", len)[0] == 3
    said = [f"{tmp_path}: indexing {count}, once" for count in ("2 tar files", "1 tar file")]
    assert capsys.readouterr().err.splitlines() == said
    write_tar(tmp_path / "upper.tar", [("N.JPEG", b"")])
    (tmp_path / "backup.tar").write_bytes(b"of no concern")
    assert train.shards(f"{tmp_path}/u*")[0] == {"__key__": "N", "jpeg": b""}


def test_an_index_is_of_the_files_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tar(tmp_path / "a.tar", [("0.txt", b"old")])
    opened = train.shards(tmp_path)
    write_tar(tmp_path / "a.tar", [("0.txt", b"new"), ("1.txt", b"more" * 9999)])
    assert [one["txt"][:4] for one in train.shards(tmp_path)] == [b"new", b"more"]
    (index,) = tmp_path.glob(module.INDEX.format("*"))
    index.write_bytes(index.read_bytes()[:-40])
    assert len(train.shards(tmp_path)) == 2
    index.unlink()
    index.mkdir()  # as in a folder that nobody may write to, root neither
    for _ in range(2):
        assert len(train.shards(tmp_path)) == 2
    assert capsys.readouterr().err.count("indexing") == 4, "kept in the state of this user"
    monkeypatch.setenv("TRAIN_STATE", "/dev/null")
    assert len(train.shards(tmp_path)) == 2
    assert "cannot be written" in capsys.readouterr().err
    os.truncate(tmp_path / "a.tar", 100)
    with pytest.raises(ValueError, match="has changed since it was indexed"):
        opened[0]


def test_rows_of_parquet_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sets(tmp_path, "parquet")
    found = train.shards(tmp_path)
    assert list(found) == ROWS and found[-1] == ROWS[-1] and file_of(found, 44) == str(tmp_path / "train-2.parquet")
    (tmp_path / "x.parquet").write_bytes(b"PAR1 or not")
    with pytest.raises(Refused, match="cannot be read"):
        train.shards(tmp_path)
    monkeypatch.setattr(module, "_HELD", 0)  # one row group is kept
    assert [found[n] for n in (50, 3, 3, 16, 59, 0)] == [ROWS[n] for n in (50, 3, 3, 16, 59, 0)]


def test_what_cannot_be_read_by_number_is_refused(tmp_path: Path) -> None:
    def refusal(name: str = "*") -> str:
        with pytest.raises(Refused) as refused:
            train.shards(tmp_path / name)
        return str(refused.value)

    assert "no .tar or .parquet files" in refusal() and "train-*.tar" in refusal("nowhere/*.tar")
    write_sets(tmp_path, "tar")
    (tmp_path / "x.parquet").touch()
    assert "both .tar and .parquet" in refusal()
    whole = (tmp_path / "train-1.tar").read_bytes()
    for cut in (100, 5000, 4096):  # within a header, within and between two files
        (tmp_path / "train-1.tar").write_bytes(whole[:cut])
        assert "train-1.tar is not a whole tar file" in refusal("*.tar")
    with tarfile.open(tmp_path / "train-1.tar", "w:gz"):
        pass
    assert "unpack a compressed one" in refusal("*.tar")
    with tarfile.open(tmp_path / "train-1.tar", "w") as tar:
        for name in ("one.txt", "two.txt"):
            (tmp_path / "one").touch()
            (tmp_path / "two").hardlink_to(tmp_path / "one") if name == "two.txt" else None
            tar.add(tmp_path / name[:3], name)
    assert "two.txt is a link" in refusal("*.tar")
    write_tar(tmp_path / "train-1.tar", [("a.txt", b""), ("a.txt", b"")])
    assert "a.txt comes twice" in refusal("*.tar")


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_a_run_over_shards_is_the_same_on_any_ranks_and_over_a_kill(kind: str, engine: Any, tmp_path: Path) -> None:
    write_sets(tmp_path, kind)
    flags = {
        "task": TASKS / "sharded.py", "data__root": tmp_path, "parallel__reduce": "ordered", "precision": "fp64",
        "checkpoint__every_steps": 2,
    }  # fmt: skip
    one, killed = f"{kind}-one", f"{kind}-killed"
    assert engine.run(one, data__workers=0, **flags)["state"] == "finished", engine.said(one)
    assert engine.run(killed, 3, data__workers=1, fault="step@1:5", **flags)["state"] == "interrupted", engine.said(
        killed
    )
    assert engine.resume(killed, 3)["state"] == "finished", engine.said(killed)
    assert engine.station.samples(killed) == engine.station.samples(one)
    assert engine.lines(killed) == engine.lines(one)
    assert engine.station.record(killed)["weights_sha256"] == engine.station.record(one)["weights_sha256"]
    said = engine.station("resume", one, "--epochs", 3, "--data.root", tmp_path / "elsewhere").stderr
    assert "no .tar or .parquet files" in said

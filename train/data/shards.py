"""Tar and parquet shards as map-style datasets. A sample is found by its number, which makes runs exact.

An IterableDataset reads shards in turn. It knows its place only by having read up to it, and its order depends on the
number of ranks and workers. Here the order is the sampler's, as for any dataset in memory.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import io
import json
import os
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from .. import screen
from ..errors import Refused, may_pass
from ..run.durable import write_atomically
from ..run.ownership import state_folder
from .fingerprint import sha256_of
from .hidden import is_below_hidden, is_hidden

Decode = Callable[[dict[str, Any]], Any]
INDEX = ".shards-index-{}.npz"
"""Name of the file beside tar shards that says where each sample lies; it holds a digest of their names."""
_FORMAT = 2
_END = 512
"""Minimum number of zero bytes at the end of a whole tar file."""
_HELD = 256 << 20
"""Maximum bytes of parquet row groups that a process keeps, so that a small set is read once."""


def shards(files: str | Path, decode: Decode | None = None) -> Shards:
    """Return the samples of tar shards (with files named as by WebDataset) or of parquet files, by number.

    A sample of tar shards is a dict from the extensions of its files to their bytes (`{"__key__": "0001", "jpg": …,
    "cls": …}`: the files `0001.jpg` and `0001.cls`, one after the other); one of parquet files is a row, a dict from
    columns to values. Samples are numbered in the order of the files' names.

    Args:
        files: a folder, or a pattern of file names (`/data/train-*.tar`).
        decode: turns such a dict into the dataset's item; None leaves it.

    Raises:
        Refused: there are no such files, one is damaged, or pyarrow, which reads parquet, is missing.
    """
    where = Path(files).absolute()
    folder, pattern = (where, "*") if where.is_dir() else (where.parent, where.name)
    found = [path for kind in (".tar", ".parquet") for path in _files(folder, pattern, kind)]
    kinds = {path.suffix for path in found}
    if not found:
        raise Refused(f"no .tar or .parquet files in {where}; name their folder, or a pattern such as 'train-*.tar'")
    if len(kinds) > 1:
        raise Refused(f"{where} has both .tar and .parquet files; name a pattern such as '{where}/*.tar'")
    return Shards(found, _Tar(found) if kinds == {".tar"} else _Parquet(found), decode)


def _files(folder: Path, pattern: str, kind: str) -> list[Path]:
    """Return the files of one kind except hidden ones, in the order of their names."""
    return sorted(path for path in folder.glob(pattern) if path.suffix == kind and not is_hidden(path.name))


class Shards(Dataset[Any]):
    """See `shards`."""

    def __init__(self, files: list[Path], samples: _Tar | _Parquet, decode: Decode | None) -> None:
        self.files = files
        """The files. A fingerprint records their names and sizes."""
        self._samples, self._decode = samples, decode

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        size = len(self)
        if not -size <= index < size:
            raise IndexError(f"sample {index} of {size}")
        sample = self._samples.read(index % size)
        return sample if self._decode is None else self._decode(sample)

    def file_of(self, index: int) -> str:
        """Return where a sample lies, for messages."""
        return self._samples.file_of(index)


@dataclass
class _Index:
    """Where the files of samples lie in tar shards."""

    shard: Any
    """The shard of each sample, [samples] int32."""
    key: Any
    """The name of each sample, [samples] bytes."""
    begin: Any
    """The first file of each sample, and the end of the last sample, [samples + 1] int64."""
    extension: Any
    """The extension of each file, [files] bytes."""
    place: Any
    """Offset and length of each file's content, [files, 2] int64."""


class _Tar:
    """Samples of tar shards in one folder."""

    def __init__(self, files: list[Path]) -> None:
        self._files, self._index = files, _index_of(files)

    def __len__(self) -> int:
        return len(self._index.key)

    def read(self, index: int) -> dict[str, Any]:
        at = self._index
        files = range(at.begin[index], at.begin[index + 1])
        made: dict[str, Any] = {"__key__": at.key[index].decode()}
        with self._path(index).open("rb", buffering=0) as shard:
            for number in files:
                offset, length = at.place[number].tolist()
                content = b"".join(_pieces(shard.fileno(), offset, length))
                if len(content) < length:
                    raise ValueError(f"{shard.name} ends within a sample, so it has changed since it was indexed")
                made[at.extension[number].decode()] = content
        return made

    def _path(self, index: int) -> Path:
        return self._files[self._index.shard[index]]

    def file_of(self, index: int) -> str:
        return f"{self._path(index)}: {self._index.key[index].decode()}"


def _pieces(fd: int, offset: int, length: int) -> Iterator[bytes]:
    """Read a stretch of a file, in several reads if one returns less."""
    while length and (piece := os.pread(fd, length, offset)):
        yield piece
        offset, length = offset + len(piece), length - len(piece)


def _index_of(files: list[Path]) -> _Index:
    """Return the index of these files. It is kept beside them, or in this user's state folder if that is not writable.

    Raises:
        Refused: a file is damaged.
    """
    facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    about = json.dumps({"format": _FORMAT, "shards": facts})
    folder, names = files[0].parent, "/".join(path.name for path in files)
    candidates = [folder / INDEX.format(sha256_of(names)[:8])]
    with contextlib.suppress(OSError):
        candidates.append(state_folder() / "shards" / f"{sha256_of(f'{folder}/{names}')[:32]}.npz")
    for file in candidates:
        # none, or a damaged one
        with contextlib.suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile), np.load(file) as kept:
            if str(kept["about"]) == about:
                return _Index(*(kept[field.name] for field in dataclasses.fields(_Index)))
    screen.say(f"{folder}: indexing {len(files)} tar file{'s' if len(files) > 1 else ''}, once")
    index = _made_index(files)
    packed = io.BytesIO()
    np.savez(packed, about=about, **vars(index))
    for file in candidates:
        with contextlib.suppress(OSError):
            if file.parent != folder:
                file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, packed.getvalue())
            return index
    screen.say(f"{candidates[0]} cannot be written, so the index is built at every start")
    return index


def _made_index(found: list[Path]) -> _Index:
    shard: list[int] = []
    keys: list[bytes] = []
    begin: list[int] = []
    extensions: list[bytes] = []
    places: list[tuple[int, int]] = []
    for number, path in enumerate(found):
        last, seen = None, set[str]()
        for name, offset, length in _members(path):
            folder, _, file = name.rpartition("/")
            stem, _, extension = file.partition(".")
            if not stem or not extension or is_below_hidden(folder):  # hidden, or without a kind: no sample's
                continue
            key, extension = f"{folder}/{stem}" if folder else stem, extension.lower()
            if key != last:
                last, seen = key, set()
                shard.append(number)
                keys.append(key.encode())
                begin.append(len(places))
            if extension in seen:
                raise Refused(f"{path}: {name} comes twice in one sample")
            seen.add(extension)
            extensions.append(extension.encode())
            places.append((offset, length))
    begin.append(len(places))
    return _Index(
        np.array(shard, np.int32), np.array(keys, np.bytes_), np.array(begin, np.int64),
        np.array(extensions, np.bytes_), np.array(places, np.int64).reshape(-1, 2),
    )  # fmt: skip


def _members(path: Path) -> Iterator[tuple[str, int, int]]:
    """Yield the name, offset and length of each regular file in a tar.

    Raises:
        Refused: the tar is damaged, cut off or compressed.
    """
    try:
        with tarfile.open(path, "r:") as tar:
            while (member := tar.next()) is not None:
                if member.islnk() or member.issparse():
                    raise Refused(f"{path}: {member.name} is a link or sparse; pack it as a plain file")
                if member.isreg():
                    yield member.name, member.offset_data, member.size
                tar.members.clear()  # type: ignore[attr-defined]  # it would keep them all
        with path.open("rb") as file:
            file.seek(-_END, os.SEEK_END)
            if any(file.read()):  # cut off between two files
                raise tarfile.TarError("no end of data")
    except (OSError, tarfile.TarError, ValueError) as error:
        if isinstance(error, OSError) and may_pass(error):
            raise
        said = f"{path} is not a whole tar file ({error}): fetch it again, or unpack a compressed one"
        raise Refused(said) from None


class _Parquet:
    """Rows of parquet files. Reading a row reads its whole row group, unless that is kept."""

    def __init__(self, files: list[Path]) -> None:
        try:
            import pyarrow as arrow
            from pyarrow import parquet
        except ImportError:
            raise Refused("pyarrow, which reads parquet files, is not installed: pip install pyarrow") from None
        try:
            about = {path: parquet.read_metadata(path) for path in files}
        except arrow.ArrowInvalid as error:
            raise Refused(f"a parquet file in {files[0].parent} cannot be read: {error}") from None
        self._about = about
        self._groups = [(path, group) for path in files for group in range(about[path].num_row_groups)]
        """The file of each row group, and its number in the file."""
        rows = [about[path].row_group(group).num_rows for path, group in self._groups]
        self._ends = np.cumsum(rows, dtype=np.int64)
        self._kept: collections.OrderedDict[int, Any] = collections.OrderedDict()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, index: int) -> dict[str, Any]:
        number = self._of(index)
        table = self._group(number)
        row: dict[str, Any] = table.slice(index - int(self._ends[number]) + table.num_rows, 1).to_pylist()[0]
        return row

    def _group(self, number: int) -> Any:
        if number in self._kept:
            self._kept.move_to_end(number)
            return self._kept[number]
        from pyarrow import parquet

        path, group = self._groups[number]
        # one thread: there are many data workers already
        with parquet.ParquetFile(path, metadata=self._about[path]) as opened:
            table = opened.read_row_group(group, use_threads=False)
        self._kept[number] = table
        while len(self._kept) > 1 and sum(one.nbytes for one in self._kept.values()) > _HELD:
            self._kept.popitem(last=False)
        return table

    def file_of(self, index: int) -> str:
        path, _ = self._groups[self._of(index)]
        return str(path)

    def _of(self, index: int) -> int:
        """Return the row group of a row."""
        return int(np.searchsorted(self._ends, index, side="right"))

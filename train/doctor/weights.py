"""Checkpoints of other programs that lie here: names that begin with `module.` fit no model but a wrapped one.

They may come from anywhere and be of anything, so how much is read of one is bounded, and what cannot be read is told.
"""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import pickletools
import shlex
import stat
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from train.doctor.finding import Finding, warning

_WRAPPED = ("module.", "_orig_mod.")
_MOST_FILES = 20
_MOST_READ = 8 * 2**20
"""Bytes, of a header, or of a list of contents and a pickle: a tensor takes some hundred in each."""
_MOST_OPERATIONS = 300_000
"""Of a pickle: a tensor takes some thirty, and a second has a few million."""
_KINDS = {
    stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip


class Unreadable(Exception):
    """What is called weights and cannot be read as such: the message says why."""


def checks(folder: Path) -> Iterator[Finding]:
    """Of the files of weights in a folder."""
    found = [path for suffix in ("safetensors", "pt", "pth") for path in sorted(folder.glob(f"*.{suffix}"))]
    for path in found[:_MOST_FILES]:
        name = shlex.quote(f"./{path.name}" if path.name.startswith("-") else path.name)
        try:
            names = names_in(path)
        except Unreadable as reason:
            yield warning("weights", f"{path.name} cannot be read: {reason}", f"ls -l {name}")
            continue
        wrapped = [name for name in names if name.startswith(_WRAPPED)]
        if wrapped:
            seen = f"{len(wrapped)} of {len(names)} names in {path.name} begin with {wrapped[0].split('.')[0]}."
            yield warning(
                "weights", f"{seen}, as a wrapped model saves them; --init takes that off",
                f"train launch TASK --init {name}",
            )  # fmt: skip


def names_in(path: Path) -> list[str]:
    """The names of the tensors in a file, or of what could be one; nothing in it is executed. [] for any other file.

    Takes a second at most, whatever is in it.

    Raises:
        Unreadable: it claims to have weights, and they cannot be read.
    """
    try:
        with _opened(path) as file:
            return _of_safetensors(file) if path.suffix == ".safetensors" else _of_zip(file)
    except IsADirectoryError:
        return []
    except OSError as error:
        raise Unreadable(error.strerror or "the system says no more") from None
    except RecursionError:
        raise Unreadable("it is nested too deep") from None
    except Unreadable:
        raise
    except Exception as error:  # zlib, zipfile, struct and json have one each for what a stranger's bytes can do
        raise Unreadable(f"it is damaged, or something else ({error or type(error).__name__})") from None


def _opened(path: Path) -> IO[bytes]:
    """The file, if it is one: to open a pipe waits for somebody who writes, and to open a device may do anything."""
    _require_a_file(path.stat().st_mode)
    # it may be another by now
    file = os.fdopen(os.open(str(path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY), "rb")
    try:
        _require_a_file(os.fstat(file.fileno()).st_mode)
    except BaseException:
        file.close()
        raise
    return file


def _require_a_file(mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise Unreadable(f"it is {_KINDS.get(stat.S_IFMT(mode), 'no file')}")


def _of_safetensors(file: IO[bytes]) -> list[str]:
    """From the header: its length in eight bytes, then JSON, whose keys are the names."""
    begin = file.read(8)
    if len(begin) < 8:
        raise Unreadable("it ends before its header does")
    length = struct.unpack("<Q", begin)[0]
    if length > _MOST_READ:
        raise Unreadable(f"its header would have {length} bytes, more than such files have")
    text = file.read(length)
    if len(text) < length:
        raise Unreadable("it ends before its header does")
    header = json.loads(text.decode(), parse_int=str, parse_float=str)  # a number of a million digits takes its time
    if not isinstance(header, dict):
        raise Unreadable("its header lists no tensors")
    return [name for name in header if name != "__metadata__"]


def _of_zip(file: IO[bytes]) -> list[str]:
    """From what torch.save writes: a zip archive with a pickle that has the names among its texts."""
    if file.read(4) != b"PK\x03\x04":  # older ones, and much else, is called .pt or .pth, too
        return []
    with zipfile.ZipFile(cast("IO[bytes]", _Sparing(file))) as archive:
        inner = next((entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl")), None)
        if inner is None:
            return []
        if inner.flag_bits & 1:
            raise Unreadable("it is encrypted")
        if inner.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise Unreadable("it is compressed in a way that torch does not know")
        with archive.open(inner) as opened:
            pickled = opened.read(_MOST_READ + 1)  # what the archive says of its length may not be so
    if len(pickled) > _MOST_READ:
        raise Unreadable(f"its list of tensors has more than {_MOST_READ} bytes")
    operations = itertools.islice(pickletools.genops(pickled), _MOST_OPERATIONS)
    strings = [argument for _, argument, _ in operations if isinstance(argument, str)]
    return [text for text in strings if text.endswith((".weight", ".bias")) or text.startswith(_WRAPPED)]


class _Sparing(io.RawIOBase):
    """A file of which so much is read and no more: zipfile takes a whole list of contents, of whatever length."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._left = file, _MOST_READ

    def read(self, size: int = -1) -> bytes:
        size = os.fstat(self._file.fileno()).st_size - self._file.tell() if size < 0 else size
        if size > self._left:
            raise Unreadable("its list of contents is longer than such files have")
        text = self._file.read(size)
        self._left -= len(text)
        return text

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def seekable(self) -> bool:
        return True

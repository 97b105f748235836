"""Writes files past the page cache and hashes them on the way.

A checkpoint is written once and hardly ever read: through the page cache it would push out the data that training
reads again and again, and wait for memory. With O_DIRECT (open(2)) the disk reads from our own buffers, while
another thread hashes the same bytes. Where a file system has no O_DIRECT, writes are ordinary.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.storage import StorageMeta

from .. import faults

_BLOCK = 4096
"""Addresses, offsets and lengths are multiples of it under O_DIRECT; disks have blocks of 512 or 4096 bytes."""
_BUFFER = 4 << 20
_BUFFERS = 3
"""One is filled, one is hashed and written, and a third may still wait for either."""
_idle: list[mmap.mmap] = []
"""Buffers of closed files, to be used again: the first touch of memory costs more than writing it."""
os.register_at_fork(after_in_child=_idle.clear)  # they are shared: two processes must not fill the same one


def _buffer() -> mmap.mmap:
    try:
        return _idle.pop()
    except IndexError:
        # on a page boundary, and shared: a fork (of data workers) during a write from private memory would corrupt it
        return mmap.mmap(-1, _BUFFER, mmap.MAP_SHARED)


class DurableFile(io.RawIOBase):
    """A new file, written from start to end. Once it is closed without an error it is on the disk.

    Attributes:
        entry: size and SHA-256 as the manifest lists them, once it is closed.

    Raises:
        OSError: from `write`, maybe about bytes of an earlier one, and then from `close` too, because torch.save
            hides the cause of the first.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.entry: dict[str, Any] = {}
        self._position = self._filled = 0
        self._error: OSError | None = None
        self._digest = hashlib.sha256()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            self._fd, self._is_direct = os.open(path, flags | os.O_DIRECT, 0o644), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._fd, self._is_direct = os.open(path, flags, 0o644), False
        self._buffers = [_buffer() for _ in range(_BUFFERS)]
        self._busy: list[list[Future[None]]] = [[] for _ in range(_BUFFERS)]
        self._turn = 0
        self._hasher, self._writer = ThreadPoolExecutor(1, "hash"), ThreadPoolExecutor(1, "write")

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def write(self, data: Any) -> int:
        source = np.frombuffer(data, np.uint8)
        done = 0
        while done < len(source):
            self._await(self._turn)
            count = min(_BUFFER - self._filled, len(source) - done)
            target = np.frombuffer(self._buffers[self._turn], np.uint8)
            target[self._filled : self._filled + count] = source[done : done + count]  # without the interpreter's lock
            done += count
            self._filled += count
            self._position += count
            if self._filled == _BUFFER:
                self._hand_over()
        return len(source)

    def _await(self, turn: int) -> None:
        """Wait until a buffer is free. An error of the disk is final."""
        while self._busy[turn]:
            try:
                self._busy[turn].pop().result()
            except OSError as error:
                self._error = self._error or error
        if self._error is not None:
            raise self._error

    def _hand_over(self) -> None:
        buffer, count = self._buffers[self._turn], self._filled
        offset = self._position - count
        self._busy[self._turn] = [
            self._hasher.submit(lambda: self._digest.update(memoryview(buffer)[:count])),
            self._writer.submit(self._put, buffer, count, offset),
        ]
        self._turn, self._filled = (self._turn + 1) % _BUFFERS, 0

    def _put(self, buffer: mmap.mmap, count: int, offset: int) -> None:
        padded = -(-count // _BLOCK) * _BLOCK if self._is_direct else count
        with memoryview(buffer) as view:
            view[count:padded] = bytes(padded - count)
            done = 0
            while done < padded:
                try:
                    done += os.pwrite(self._fd, view[done:padded], offset + done)
                except OSError as error:
                    if error.errno != errno.EINVAL or not self._is_direct:
                        raise
                    # some file systems accept the flag and refuse the write, or know larger blocks
                    fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
                    self._is_direct = False
        faults.here("save.written")

    def close(self) -> None:
        if self.closed:
            return
        try:
            if self._filled and self._error is None:
                self._hand_over()
            for turn in range(_BUFFERS):
                self._await(turn)
            os.ftruncate(self._fd, self._position)
            os.fsync(self._fd)
            self.entry = {"size": self._position, "sha256": self._digest.hexdigest()}
        finally:
            self._hasher.shutdown()
            self._writer.shutdown()
            _idle.extend(self._buffers)
            os.close(self._fd)
            super().close()


class DurableWriter(dcp.FileSystemWriter):
    """torch.distributed.checkpoint's file writer, on `DurableFile`.

    Attributes:
        entries: by name, the manifest's entry of each file that this process has written.
    """

    def __init__(self, folder: Path) -> None:
        # copying ahead is for tensors on a GPU, and would make the writing thread wait for the first GPU
        super().__init__(folder, single_file_per_rank=True, sync_files=False, thread_count=1, per_thread_copy_ahead=0)
        self.fs = files = _Files()
        self.entries = files.entries

    def storage_meta(self) -> StorageMeta | None:
        return None  # it would hold this folder's path, and a run may be copied or renamed


class _Files(FileSystem):
    def __init__(self) -> None:
        self.entries: dict[str, dict[str, Any]] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        assert mode == "wb"
        with DurableFile(Path(path)) as file:
            yield file
        self.entries[Path(path).name] = file.entry

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.entries[Path(new_path).name] = self.entries.pop(Path(path).name)

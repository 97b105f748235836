"""Shared-memory buffers that hold copies of the training state and outlive the ranks that write them.

The process that starts the ranks owns two buffers for each part of the state: each rank of the machine has one part.
Each is an anonymous file in memory (memfd_create(2)). Ranks open it by the owner's entry in /proc,
so nothing is inherited, and the memory is free once the owner is gone.

A buffer holds a header, a pickled part and the tensors. A copy goes into the older of the two: its header is wiped, the
content is written, and last the header, with the step and a checksum. So a copy that a kill interrupts has no valid
header, and the other buffer still has the copy before. Imports no torch.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import struct
import zlib
from dataclasses import dataclass

from .. import faults

ENVIRONMENT = "TRAIN_SNAPSHOT"
"""Name of the variable with the address of the buffers for ranks. Without it there are no buffers."""
_PAGE = 4096
_HEAD = struct.Struct("<8sqqqQ")
"""Magic, step, bytes of the pickled part and of the tensors, checksum of both. A CRC-32 of these bytes follows."""
_SEAL = struct.Struct("<I")
_MAGIC = b"train-s2"


@dataclass(frozen=True)
class Head:
    """The header of a complete copy."""

    step: int
    plain: int
    """Bytes of the pickled part, which describes the tensors."""
    tensors: int
    """Bytes of the tensors, which begin at `start`: a multiple of 8."""
    checksum: int

    @property
    def start(self) -> int:
        return begin_of_tensors(self.plain)


def begin_of_tensors(plain: int) -> int:
    """Return the offset of the tensors behind a pickled part of this many bytes, aligned to a page."""
    return _PAGE + -(-plain // _PAGE) * _PAGE


class SnapshotMemory:
    """The buffers, as owned by the process that starts the ranks."""

    def __init__(self, parts: int = 1) -> None:
        """
        Args:
            parts: number of parts into which the ranks of this machine divide the state.
        """
        self._files = [os.memfd_create(f"train-snapshot-{n}", os.MFD_CLOEXEC) for n in range(2 * parts)]

    @property
    def address(self) -> str:
        """The argument with which `Buffers` opens them."""
        return ":".join(f"/proc/{os.getpid()}/fd/{fd}" for fd in self._files)

    @property
    def step(self) -> int:
        """The newest step of which every part has a snapshot, by the headers alone; 0: none."""
        steps = [head.step if (head := _head(fd)) else 0 for fd in self._files]
        return max(set.intersection(*({*pair} for pair in zip(steps[::2], steps[1::2], strict=True))), default=0)

    def close(self) -> None:
        for fd in self._files:
            os.close(fd)


class Buffers:
    """A rank's view of the two buffers of one part. One rank at a time writes to them."""

    def __init__(self, address: str, part: int = 0) -> None:
        """Open the buffers of a part.

        Raises:
            OSError: the owner is gone or belongs to another user, or there is no such part.
        """
        paths = address.split(":")[2 * part : 2 * part + 2]
        if not paths:
            raise FileNotFoundError(errno.ENOENT, "there is no memory for the copies of this rank")
        self._files = [os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in paths]

    @property
    def taken(self) -> int:
        """Bytes of memory of both buffers."""
        return sum(os.fstat(fd).st_size for fd in self._files)

    def holds(self, size: int) -> bool:
        """Whether each buffer has this many bytes."""
        return all(os.fstat(fd).st_size >= size for fd in self._files)

    def reserve(self, size: int) -> None:
        """Allocate this many bytes for each buffer, so that writing to them cannot fail.

        Raises:
            OSError: there is not enough memory.
        """
        for fd in self._files:
            os.posix_fallocate(fd, 0, size)

    def map(self) -> list[mmap.mmap]:
        """Map both buffers as a whole, for writing."""
        return [mmap.mmap(fd, os.fstat(fd).st_size, flags=mmap.MAP_SHARED) for fd in self._files]

    @property
    def steps(self) -> dict[int, int]:
        """Maps the step of each complete snapshot to its buffer."""
        return {head.step: slot for slot, fd in enumerate(self._files) if (head := _head(fd))}

    def begin(self) -> int:
        """Invalidate the older snapshot. Returns its buffer, to be written and sealed."""
        steps = [head.step if (head := _head(fd)) else -1 for fd in self._files]
        slot = steps.index(min(steps))
        self.wipe(slot)
        faults.here("snapshot.begin")
        return slot

    def seal(self, slot: int, memory: mmap.mmap, step: int, plain: bytes, tensors: int) -> None:
        """Write the pickled part, then the header of a copy whose tensors have been written.

        Args:
            memory: the mapped buffer.
            tensors: bytes of them, a multiple of 8, from `begin_of_tensors(len(plain))` on.
        """
        memory[_PAGE : _PAGE + len(plain)] = plain
        checksum = _checksum(memory, len(plain), tensors)
        faults.here("snapshot.written")
        head = _HEAD.pack(_MAGIC, step, len(plain), tensors, checksum)
        os.pwrite(self._files[slot], head + _SEAL.pack(zlib.crc32(head)), 0)
        faults.here("snapshot.sealed")

    def is_whole(self, slot: int) -> bool:
        """Whether the checksum fits the snapshot in a buffer."""
        fd, head = self._files[slot], _head(self._files[slot])
        if head is None or os.fstat(fd).st_size < head.start + head.tensors:
            return False
        with mmap.mmap(fd, head.start + head.tensors, flags=mmap.MAP_PRIVATE) as memory:
            return _checksum(memory, head.plain, head.tensors) == head.checksum

    def read(self, slot: int) -> tuple[bytes, memoryview]:
        """Return the pickled part and the tensors of a whole snapshot.

        The mapping is private: changes to it do not reach the buffer.
        """
        head = _head(self._files[slot])
        assert head is not None
        memory = mmap.mmap(self._files[slot], head.start + head.tensors, flags=mmap.MAP_PRIVATE)
        return memory[_PAGE : _PAGE + head.plain], memoryview(memory)[head.start :]

    def wipe(self, slot: int) -> None:
        """Invalidate the copy in a buffer."""
        os.pwrite(self._files[slot], bytes(_HEAD.size + _SEAL.size), 0)

    def wipe_steps(self, first: int, last: float = math.inf) -> None:
        """Invalidate the snapshots of these steps."""
        for held, slot in self.steps.items():
            if first <= held <= last:
                self.wipe(slot)


def _head(fd: int) -> Head | None:
    text = os.pread(fd, _HEAD.size + _SEAL.size, 0)
    if len(text) < _HEAD.size + _SEAL.size or zlib.crc32(text[: _HEAD.size]) != _SEAL.unpack_from(text, _HEAD.size)[0]:
        return None
    magic, step, plain, tensors, checksum = _HEAD.unpack_from(text)
    return Head(step, plain, tensors, checksum) if magic == _MAGIC else None


def _checksum(memory: mmap.mmap, plain: int, tensors: int) -> int:
    """Return a CRC-32 of the pickled part, combined with the sum of the tensors' 64-bit words, which is eight times as
    fast as a CRC-32."""
    import numpy as np

    words = np.frombuffer(memory, dtype=np.uint64, count=tensors // 8, offset=begin_of_tensors(plain))
    return (zlib.crc32(memory[_PAGE : _PAGE + plain]) << 32) ^ int(words.sum(dtype=np.uint64))

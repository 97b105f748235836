"""Memory that outlives the ranks that write it: two buffers and a bell, owned by the process that supervises them.

Where each rank has a part of the state only, there are two buffers for each of them.

Each is an anonymous file in memory (memfd_create(2)). Ranks open them by the supervisor's entry in /proc, so nothing is
inherited, and the memory is free once the supervisor is gone: what must outlive him is on the disk.

A buffer holds a header and a content. It is written like this: the header is wiped, the content is written, the header
comes last, with the step and the checksum of all. So a buffer that a death left half-written has no valid header, and
the other one still has the state before. Writers take turns by a file lock, which the death of one of them releases.

Lines that a full disk refuses lie in a file of their own here, until there are ranks again (record/metrics.py).

The bell is a file lock that the supervisor holds: who waits for it is woken when a rank has died. Imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from train import faults

ENVIRONMENT = "TRAIN_SNAPSHOT"
"""Where ranks read the address of the memory; not set: there is none."""
_PAGE = 4096
_HEAD = struct.Struct("<8sqqqI")
"""Magic, step, bytes of the plain part and of all tensors, CRC-32 of both. Another CRC-32, of this, follows."""
_SEAL = struct.Struct("<I")
_MAGIC = b"train-s1"
_VECTORS = 512
"""Pieces in one call of the system, which takes at most 1024 (IOV_MAX)."""

Piece = memoryview | bytes


@dataclass(frozen=True)
class Head:
    """What the header of a whole buffer says."""

    step: int
    plain: int
    """Bytes of the part that says what the tensors are."""
    tensors: int
    """Bytes of the tensors, which begin at the next multiple of a page."""
    checksum: int

    @property
    def start(self) -> int:
        """Where the tensors begin."""
        return begin_of_tensors(self.plain)


def begin_of_tensors(plain: int) -> int:
    """Where in a buffer the tensors begin, after so many bytes of plain part: at a page, so that they lie aligned."""
    return _PAGE + -(-plain // _PAGE) * _PAGE


class Owned:
    """The supervisor's side."""

    def __init__(self, parts: int = 1) -> None:
        """
        Args:
            parts: into how many the ranks here divide the state that they keep.
        """
        self._buffers = [os.memfd_create(f"train-snapshot-{n}", os.MFD_CLOEXEC) for n in range(2 * parts)]
        self._bell = os.memfd_create("train-bell", os.MFD_CLOEXEC)
        self._lines = os.memfd_create("train-lines", os.MFD_CLOEXEC)
        self.hush()

    @property
    def parts(self) -> int:
        """Into how many the state that is kept here is divided."""
        return len(self._buffers) // 2

    @property
    def address(self) -> str:
        """For `Slots`."""
        return ":".join(f"/proc/{os.getpid()}/fd/{fd}" for fd in (*self._buffers, self._bell, self._lines))

    @property
    def step(self) -> int:
        """The newest step that is kept, in all its parts; 0: none. What it is worth is only known when it is read."""
        steps = [head.step if (head := _head(fd)) else 0 for fd in self._buffers]
        pairs = zip(steps[::2], steps[1::2], strict=True)
        return max(set.intersection(*({*pair} for pair in pairs)), default=0)

    @property
    def is_written(self) -> bool:
        """Whether a rank writes to one of the buffers just now."""
        for fd in self._buffers[::2]:
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            fcntl.flock(fd, fcntl.LOCK_UN)
        return False

    @property
    def size(self) -> int:
        """Bytes of the largest buffer."""
        return max(os.fstat(fd).st_size for fd in self._buffers)

    def hush(self) -> None:
        """Before an attempt: nobody has died."""
        fcntl.flock(self._bell, fcntl.LOCK_EX)

    def ring(self) -> None:
        """Wake those who wait for a death."""
        fcntl.flock(self._bell, fcntl.LOCK_UN)

    def close(self) -> None:
        for fd in (*self._buffers, self._bell, self._lines):
            os.close(fd)

    @property
    def lines(self) -> bytes:
        """What a full disk has refused of what ranks had to write in lines."""
        return os.pread(self._lines, os.fstat(self._lines).st_size, 0)

    def forget_lines(self) -> None:
        os.ftruncate(self._lines, 0)


def lines_of(address: str) -> Path:
    """The file in memory for lines that the disk refuses, of what an `Owned` has told."""
    return Path(address.rpartition(":")[2])


class Slots:
    """A rank's side."""

    def __init__(self, address: str, part: int = 0) -> None:
        """Open what an `Owned` has told.

        Args:
            part: of those that the state is divided into.

        Raises:
            OSError: its owner is gone, or is another user's, or there is no such part.
        """
        *buffers, bell, _ = address.split(":")
        mine = buffers[2 * part : 2 * part + 2]
        if not mine:
            raise FileNotFoundError(errno.ENOENT, "nothing is kept for this rank")
        *self._buffers, self._bell = (os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in (*mine, bell))

    def reserve(self, size: int) -> None:
        """Take memory for two contents of so many bytes, so that writing them asks for none.

        Raises:
            OSError: there is none.
        """
        for fd in self._buffers:
            os.posix_fallocate(fd, 0, size)

    @property
    def taken(self) -> int:
        """Bytes of memory that both buffers have."""
        return sum(os.fstat(fd).st_size for fd in self._buffers)

    def holds(self, size: int) -> bool:
        """Whether memory for so many bytes has been taken."""
        return all(os.fstat(fd).st_size >= size for fd in self._buffers)

    def wait_for_bell(self) -> None:
        """Wait until a rank has died."""
        fcntl.flock(self._bell, fcntl.LOCK_SH)
        fcntl.flock(self._bell, fcntl.LOCK_UN)

    @property
    def steps(self) -> dict[int, int]:
        """The steps that are kept, and in which buffer each."""
        return {head.step: slot for slot, fd in enumerate(self._buffers) if (head := _head(fd))}

    def newest(self) -> tuple[int, Head] | None:
        """The buffer with the newest state, and what it says of itself."""
        found = [(slot, head) for slot, fd in enumerate(self._buffers) if (head := _head(fd))]
        return max(found, key=lambda one: one[1].step, default=None)

    def write(self, step: int, plain: bytes, tensors: Iterator[Piece], patience: float = 0.0) -> bool:
        """Keep the state after a step, in the buffer with the older one. Whether it is kept, or a newer one.

        Args:
            tensors: the bytes of the tensors, without gaps.
            patience: seconds to wait for another writer.

        Raises:
            OSError: the memory cannot be written.
        """
        if not self._take_turn(patience):
            return False
        try:
            steps = [head.step if (head := _head(fd)) else -1 for fd in self._buffers]
            if max(steps) < step:
                _fill(self._buffers[steps.index(min(steps))], step, plain, tensors)
            return True
        finally:
            fcntl.flock(self._buffers[0], fcntl.LOCK_UN)

    def open(self, step: int) -> Draft | None:
        """Begin to keep the state after a step, whose tensors somebody else will write, over the older one. None where
        another writes just now, or there is a newer one."""
        if not self._take_turn(0.0):
            return None
        steps = [head.step if (head := _head(fd)) else -1 for fd in self._buffers]
        if max(steps) >= step:
            fcntl.flock(self._buffers[0], fcntl.LOCK_UN)
            return None
        slot = steps.index(min(steps))
        _wipe(self._buffers[slot])
        faults.here("snapshot.begin")
        return Draft(slot, step, self._buffers[slot], self._buffers[0])

    def memory(self) -> list[mmap.mmap]:
        """Both buffers, whole, to be written."""
        return [mmap.mmap(fd, os.fstat(fd).st_size, flags=mmap.MAP_SHARED) for fd in self._buffers]

    def read(self, slot: int) -> tuple[bytes, mmap.mmap] | None:
        """The content of a buffer: its plain part, and where the tensors lie. None if it is not what was written.

        What is written to the mapping stays with the one who writes.
        """
        fd, head = self._buffers[slot], _head(self._buffers[slot])
        if head is None or os.fstat(fd).st_size < head.start + head.tensors:
            return None
        memory = mmap.mmap(fd, head.start + head.tensors, flags=mmap.MAP_PRIVATE)
        with memoryview(memory) as view:
            plain = bytes(view[_PAGE : _PAGE + head.plain])
            checksum = zlib.crc32(view[head.start : head.start + head.tensors], zlib.crc32(plain))
        return (plain, memory) if checksum == head.checksum else None

    def wipe(self, slot: int) -> None:
        """Forget what a buffer holds."""
        _wipe(self._buffers[slot])

    def wipe_from(self, step: int) -> None:
        """Forget the states after this step and later ones."""
        for kept, slot in self.steps.items():
            if kept >= step:
                self.wipe(slot)

    def close(self) -> None:
        for fd in (*self._buffers, self._bell):
            os.close(fd)

    def _take_turn(self, patience: float) -> bool:
        deadline = time.monotonic() + patience
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._buffers[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)


class Draft:
    """A buffer whose tensors are being written. It has no valid header until it is sealed."""

    def __init__(self, slot: int, step: int, fd: int, turn: int) -> None:
        self.slot, self._step, self._fd, self._turn = slot, step, fd, turn

    def seal(self, plain: bytes, memory: memoryview, tensors: int) -> None:
        """The tensors are there.

        Args:
            memory: the buffer, whole.
            tensors: bytes of them; where they begin follows from the length of `plain`.

        Raises:
            OSError: the memory cannot be written.
        """
        _pwrite_all(self._fd, [plain], _PAGE)
        start = begin_of_tensors(len(plain))
        checksum = zlib.crc32(memory[start : start + tensors], zlib.crc32(plain))
        faults.here("snapshot.written")
        _seal(self._fd, self._step, len(plain), tensors, checksum)

    def close(self) -> None:
        """Let others write; what was not sealed is none."""
        fcntl.flock(self._turn, fcntl.LOCK_UN)


def _head(fd: int) -> Head | None:
    text = os.pread(fd, _HEAD.size + _SEAL.size, 0)
    if len(text) < _HEAD.size + _SEAL.size or zlib.crc32(text[: _HEAD.size]) != _SEAL.unpack_from(text, _HEAD.size)[0]:
        return None
    magic, step, plain, tensors, checksum = _HEAD.unpack_from(text)
    return Head(step, plain, tensors, checksum) if magic == _MAGIC else None


def _wipe(fd: int) -> None:
    os.pwrite(fd, bytes(_HEAD.size + _SEAL.size), 0)


def _fill(fd: int, step: int, plain: bytes, tensors: Iterator[Piece]) -> None:
    _wipe(fd)
    faults.here("snapshot.begin")
    _pwrite_all(fd, [plain], _PAGE)
    checksum, place = zlib.crc32(plain), begin_of_tensors(len(plain))
    at, batch = place, 0
    pieces: list[Piece] = []
    for piece in tensors:
        checksum = zlib.crc32(piece, checksum)
        pieces.append(piece)
        batch += len(piece)
        if len(pieces) == _VECTORS or batch > 1 << 24:
            _pwrite_all(fd, pieces, at)
            at, batch, pieces = at + batch, 0, []
    _pwrite_all(fd, pieces, at)
    faults.here("snapshot.written")
    _seal(fd, step, len(plain), at + batch - place, checksum)


def _seal(fd: int, step: int, plain: int, tensors: int, checksum: int) -> None:
    head = _HEAD.pack(_MAGIC, step, plain, tensors, checksum)
    os.pwrite(fd, head + _SEAL.pack(zlib.crc32(head)), 0)
    faults.here("snapshot.sealed")


def _pwrite_all(fd: int, pieces: Sequence[Piece], at: int) -> None:
    """Write pieces one after the other, however much the system takes at a time."""
    views = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
    while views:
        taken = os.pwritev(fd, views, at)
        at += taken
        while views and taken >= len(views[0]):
            taken -= len(views.pop(0))
        if views and taken:
            views[0] = views[0][taken:]

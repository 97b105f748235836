"""Memory outside the ranks: what is read is what was written last and whole, whatever killed a writer when."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from train import faults
from train.checkpoint.buffers import Buffers, SnapshotMemory, begin_of_tensors

pytestmark = pytest.mark.never_forgiven

PLAIN = b"what the tensors are"
SIZE = 3 * 4096 + 9000


@pytest.fixture
def memory() -> Iterator[SnapshotMemory]:
    made = SnapshotMemory()
    yield made
    made.close()


@pytest.fixture
def buffers(memory: SnapshotMemory) -> Buffers:
    made = Buffers(memory.address)
    made.reserve(SIZE)
    return made


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    faults.arm(None, 0)


def _bytes(step: int) -> bytes:
    return bytes((step + place) % 251 for place in range(9000))


def _write(buffers: Buffers, step: int) -> None:
    slot, content, start = buffers.begin(), _bytes(step), begin_of_tensors(len(PLAIN))
    memory = buffers.map()[slot]
    memory[start : start + len(content)] = content
    buffers.seal(slot, memory, step, PLAIN, len(content))


def _is_whole(buffers: Buffers, step: int) -> bool:
    """Whether the newest buffer holds this step, and gives back what was written."""
    assert max(buffers.steps) == step
    slot = buffers.steps[step]
    return buffers.is_whole(slot) and buffers.read(slot) == (PLAIN, _bytes(step))


def test_what_was_written_last_is_read_by_who_opens_it_later(memory: SnapshotMemory, buffers: Buffers) -> None:
    assert (buffers.steps, memory.step) == ({}, 0)
    for step in (1, 2, 7):
        _write(buffers, step)
        assert memory.step == step
        assert _is_whole(Buffers(memory.address), step)
    assert buffers.steps.keys() == {2, 7}


@pytest.mark.parametrize("place", [0, 8, 32, 41, 4096, 4100, 8192, 8192 + 8999])
def test_a_flipped_byte_is_found(memory: SnapshotMemory, buffers: Buffers, place: int) -> None:
    _write(buffers, 1)
    _write(buffers, 2)
    fd = os.open(memory.address.split(":")[1], os.O_RDWR)
    os.pwrite(fd, bytes([os.pread(fd, 1, place)[0] ^ 1]), place)
    os.close(fd)
    assert not buffers.is_whole(1)
    buffers.wipe(1)
    assert _is_whole(buffers, 1)


@pytest.mark.parametrize("point", ["begin", "written"])
def test_a_writer_that_is_killed_leaves_the_copy_before(memory: SnapshotMemory, buffers: Buffers, point: str) -> None:
    _write(buffers, 1)
    _write(buffers, 2)
    pid = os.fork()
    if not pid:  # pragma: no cover
        faults.arm(f"snapshot.{point}", 0)
        _write(Buffers(memory.address), 3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert _is_whole(buffers, 2)
    _write(buffers, 3)
    assert _is_whole(buffers, 3)


def test_without_its_owner_there_is_no_memory() -> None:
    gone = SnapshotMemory()
    address = gone.address
    gone.close()
    with pytest.raises(OSError, match="No such file"):
        Buffers(address)


def test_copies_of_steps_that_are_made_again_are_forgotten(buffers: Buffers) -> None:
    for step in (7, 9):
        _write(buffers, step)
    buffers.wipe_steps(8)
    assert buffers.steps.keys() == {7}
    _write(buffers, 8)
    assert buffers.steps.keys() == {7, 8}


def test_only_a_step_that_all_parts_have_counts() -> None:
    memory = SnapshotMemory(3)
    try:
        parts = [Buffers(memory.address, part) for part in range(3)]
        with pytest.raises(FileNotFoundError):
            Buffers(memory.address, 3)
        for part in parts:
            part.reserve(SIZE)
            _write(part, 4)
        for part in parts[:2]:
            _write(part, 9)
        assert memory.step == 4
        _write(parts[2], 9)
        assert memory.step == 9
        parts[1].wipe(parts[1].steps[9])
        parts[2].wipe(parts[2].steps[4])
        assert memory.step == 0
    finally:
        memory.close()

"""Memory outside the ranks: what is read is what was written last and whole, whatever killed a writer when."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from train import faults
from train.checkpoint.shared import Owned, Slots

PLAIN = b"what the tensors are"


@pytest.fixture
def owned() -> Iterator[Owned]:
    made = Owned()
    yield made
    made.close()


@pytest.fixture
def slots(owned: Owned) -> Iterator[Slots]:
    made = Slots(owned.address)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    faults.arm(None, 0)


def _bytes(step: int, count: int = 9000) -> bytes:
    return bytes((step + place) % 251 for place in range(count))


def _write(slots: Slots, step: int, patience: float = 0.0) -> bool:
    content = _bytes(step)
    return slots.write(step, PLAIN, iter([content[:100], content[100:]]), patience)


def _is_whole(slots: Slots, step: int) -> bool:
    """Whether the newest buffer holds this step, and gives back what was written."""
    found = slots.newest()
    assert found is not None and found[1].step == step
    read = slots.read(found[0])
    return read is not None and read[0] == PLAIN and read[1][found[1].start :] == _bytes(step)


def test_what_was_written_last_is_read_by_who_opens_it_later(owned: Owned, slots: Slots) -> None:
    assert (slots.newest(), owned.step) == (None, 0)
    for step in (1, 2, 7):
        assert _write(slots, step)
        assert owned.step == step
        assert _is_whole(Slots(owned.address), step)


def test_more_pieces_than_the_system_takes_at_a_time_are_written(slots: Slots) -> None:
    pieces = [bytes([n % 256]) * (n % 7) for n in range(3000)]
    assert slots.write(1, PLAIN, iter(pieces))
    read = slots.read(0)
    assert read is not None and read[1][8192:] == b"".join(pieces)


def test_the_newest_state_is_never_the_one_that_is_written_over(slots: Slots) -> None:
    _write(slots, 4)
    _write(slots, 5)
    assert _write(slots, 3)  # what is there is newer
    assert _is_whole(slots, 5)
    faults.arm("snapshot.written:1:error", 0)
    with pytest.raises(OSError, match=r"snapshot\.written"):
        _write(slots, 6)
    assert _is_whole(slots, 5)


@pytest.mark.parametrize("place", [0, 8, 32, 39, 4096, 4100, 8192, 8192 + 8999])
def test_a_flipped_byte_is_found(owned: Owned, slots: Slots, place: int) -> None:
    _write(slots, 1)
    _write(slots, 2)
    newest = slots.newest()
    assert newest is not None and newest[0] == 1
    fd = owned._buffers[1]
    os.pwrite(fd, bytes([os.pread(fd, 1, place)[0] ^ 1]), place)
    if place < 4096:  # the header
        assert slots.read(1) is None and _is_whole(slots, 1)
    else:
        assert slots.read(1) is None
        slots.wipe(1)
        assert _is_whole(slots, 1)


@pytest.mark.parametrize("point", ["begin", "written"])
def test_a_writer_that_is_killed_leaves_the_state_before_and_its_turn(owned: Owned, slots: Slots, point: str) -> None:
    _write(slots, 1)
    _write(slots, 2)
    pid = os.fork()
    if not pid:  # pragma: no cover
        faults.arm(f"snapshot.{point}", 0)
        _write(Slots(owned.address), 3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert _is_whole(slots, 2)
    assert _write(slots, 3)
    assert _is_whole(slots, 3)


def test_a_writer_waits_for_another_as_long_as_it_may(owned: Owned, slots: Slots) -> None:
    other = Slots(owned.address)
    going_on = threading.Event()

    def pieces() -> Iterator[bytes]:
        going_on.wait()
        yield _bytes(1)

    writer = threading.Thread(target=lambda: other.write(1, PLAIN, pieces()))
    writer.start()
    while _write(slots, 2):  # until the other one has its turn
        slots.wipe(0)
        slots.wipe(1)
    threading.Timer(0.2, going_on.set).start()
    assert _write(slots, 3, patience=30.0)
    writer.join()
    assert _is_whole(slots, 3)


def test_the_bell_wakes_those_who_wait_and_no_others(owned: Owned) -> None:
    woken: list[float] = []

    def wait() -> None:
        Slots(owned.address).wait_for_bell()
        woken.append(time.monotonic())

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    assert not woken
    owned.ring()
    for thread in threads:
        thread.join(timeout=30)
    assert len(woken) == 2
    owned.hush()  # for the next attempt
    late = threading.Thread(target=wait, daemon=True)
    late.start()
    late.join(timeout=0.2)
    assert late.is_alive()
    owned.ring()
    late.join(timeout=30)
    assert not late.is_alive()


def test_memory_is_reserved_and_counted(owned: Owned, slots: Slots) -> None:
    assert owned.size == 0 and not slots.holds(1 << 20)
    slots.reserve(1 << 20)
    assert owned.size == 1 << 20 and slots.holds(1 << 20) and not slots.holds((1 << 20) + 1)


def test_without_its_owner_there_is_no_memory() -> None:
    gone = Owned()
    address = gone.address
    gone.close()
    with pytest.raises(OSError, match="No such file"):
        Slots(address)


def test_what_lies_there_of_steps_that_are_made_anew_is_forgotten(owned: Owned) -> None:
    slots = Slots(owned.address)
    for step in (7, 9):
        slots.write(step, b"plain", iter([b"tensors"]))
    slots.wipe_from(8)
    assert slots.steps.keys() == {7}
    slots.write(8, b"plain", iter([b"tensors"]))
    assert slots.steps.keys() == {7, 8}

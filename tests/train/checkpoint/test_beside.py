"""Snapshots that the device copies while the host goes on. Here the device is a CPU: it copies at once, and the rest,
losses that are read later, the seal, the turns, is what it is on a GPU (tests/gpu has those)."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.train.checkpoint.test_snapshot import CPU, Seat
from train.checkpoint import packed, room
from train.checkpoint.beside import Beside
from train.checkpoint.shared import Owned, Slots


@pytest.fixture
def owned() -> Iterator[Owned]:
    made = Owned()
    yield made
    made.ring()
    made.close()


class Device(Seat):
    """A seat whose state is copied by its device."""

    def __init__(self, address: str, **more: Any) -> None:
        super().__init__(address, **more)
        self.beside = self.snapshots._beside = Beside(self.slots, CPU)

    def copy(self) -> None:
        """Another step, and a copy of the state after it, begun."""
        self.settle()
        self.step()

    def settle(self) -> None:
        """What is under way comes to its end, and another copy is due."""
        if self.beside._thread is not None:
            self.beside._thread.join()
        self.beside.cost = self.beside._at = self.snapshots._due = 0.0

    def ready(self) -> Device:
        """Two steps and what they make ready: the memory is there, and locked."""
        self.step(2)
        self.settle()
        assert self.beside._memory
        return self


def test_another_goes_on_from_it_bit_for_bit(owned: Owned) -> None:
    one = Device(owned.address).ready()
    for last in (3, 4, 5):  # in one buffer, the other, and the first one again
        one.copy()
        one.beside.wait()
        assert owned.step == last
        other = Seat(owned.address)
        assert other.take_up() and other.done == last
        assert other.bits() == one.bits()
        assert other.model.conv.weight.stride() == one.model.conv.weight.stride()
        assert other.model.two.weight is other.model.one.weight


def test_it_is_of_the_step_after_which_it_was_asked_for(owned: Owned) -> None:
    one, was_read = Device(owned.address).ready(), threading.Event()
    line = {"step": 3, "loss": 0.5}

    def lines() -> list[Any]:
        assert was_read.wait(30)
        return [line]

    one.snapshots.lines = lambda: lines
    one.copy()
    bits = one.bits()
    one.step(5)  # the host goes on
    assert one.beside.is_busy and owned.step == 0
    was_read.set()
    one.beside.wait()
    other = Seat(owned.address)
    assert other.take_up() and other.done == owned.step == 3
    assert other.bits() == bits
    found = packed.read(one.slots, one.slots.steps[3], "same")
    assert found is not None and found.lines == [line]


def test_a_loss_that_is_not_finite_is_not_kept_and_the_state_before_it_is(owned: Owned) -> None:
    one = Device(owned.address).ready()
    one.copy()
    one.beside.wait()
    one.snapshots.lines = lambda: lambda: None
    one.copy()
    one.beside.wait()
    assert owned.step == 3 and not one.beside.problem
    one.snapshots.lines = lambda: list
    one.copy()
    one.beside.wait()
    assert owned.step == 5


def test_more_lines_than_there_is_room_for_are_not_kept(owned: Owned) -> None:
    one = Device(owned.address).ready()
    one.snapshots.lines = lambda: lambda: [{"step": 3, "words": "x" * room.SLACK}]  # type: ignore[list-item]
    one.copy()
    one.beside.wait()
    assert owned.step == 0 and not one.beside.problem


def test_what_fails_later_is_said_and_ends_it(owned: Owned) -> None:
    def lines() -> list[Any]:
        raise OSError("the device is lost")

    one = Device(owned.address).ready()
    one.snapshots.lines = lambda: lines
    one.copy()
    one.copy()
    assert one.said[-1] == "no more snapshots in memory: the device is lost"
    assert not one.snapshots.is_on
    assert Slots(owned.address).open(9) is not None  # it is others' turn


def test_one_writes_at_a_time(owned: Owned) -> None:
    one = Device(owned.address).ready()
    draft = Slots(owned.address).open(7)
    assert draft is not None
    one.copy()
    one.beside.wait()
    assert owned.step == 0
    draft.close()
    one.copy()
    one.beside.wait()
    assert owned.step == 4
    assert one.slots.open(4) is None and one.slots.open(3) is None  # as new a one is there
    assert one.slots.write(5, b"", iter(()))  # and it has left the turn to others


def test_a_state_that_grows_gets_more_memory(owned: Owned) -> None:
    one = Device(owned.address).ready()
    one.copy()
    one.beside.wait()
    assert owned.step == 3
    before = owned.size
    one.model.register_buffer("more", torch.zeros(1 << 16))
    one.copy()  # which finds that it does not fit, and takes more memory
    one.copy()  # which locks it
    one.copy()
    one.beside.wait()
    assert owned.step == 6 and owned.size > before
    other = Seat(owned.address)
    other.model.register_buffer("more", torch.ones(1 << 16))
    assert other.take_up() and other.bits() == one.bits()


def test_each_thread_that_locks_memory_or_lets_it_go_uses_the_gpu_of_its_rank(
    owned: Owned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread begins on the first GPU, and would open it, on every rank."""
    used = list[tuple[str, Any]]()
    current = threading.local()

    class Runtime:
        """What torch has of CUDA's, which locks nothing and remembers which GPU it was asked on."""

        def cudaHostRegister(self, *_: int) -> int:
            used.append(("lock", getattr(current, "gpu", 0)))
            return 0

        def cudaHostUnregister(self, _: int) -> int:
            used.append(("let go", getattr(current, "gpu", 0)))
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(current, "gpu", device.index))
    slots = Slots(owned.address)
    beside = Beside(slots, torch.device("cuda", 1))
    for size in (1 << 12, 1 << 16):  # the state grows
        slots.reserve(size)
        assert not beside.holds(size)  # locked by a thread
        assert beside._thread is not None
        beside._thread.join()
        assert beside.holds(size)
    assert used == [(what, 1) for what in ("lock", "lock", "let go", "let go", "lock", "lock")]


def test_it_is_taken_as_often_as_it_takes_a_hundredth_of_the_time(owned: Owned) -> None:
    one = Device(owned.address).ready()
    one.copy()
    one.beside.wait()
    one.snapshots._due, one.beside.cost = 0.0, 3600.0
    one.step(20)
    assert owned.step == 3
    one.beside._at -= 360_000.0
    one.snapshots._due = time.monotonic() + 3600.0  # what the host has spent counts too, where nothing was copied
    one.step(20)
    assert owned.step == 3
    one.snapshots._due = 0.0
    one.step()
    one.beside.wait()
    assert owned.step == 44


def test_a_kill_while_it_is_written_leaves_the_one_before(owned: Owned) -> None:
    one = Device(owned.address).ready()
    one.copy()
    one.beside.wait()
    bits = one.bits()
    pid = os.fork()
    if not pid:
        die = ctypes.CDLL(None).kill
        try:
            torch.set_num_threads(1)  # a fork has none of the others, and would wait for them
            mine = Device(owned.address)
            mine.take_up()
            mine.ready()  # two steps further

            def lines() -> list[Any]:
                die(os.getpid(), signal.SIGKILL)
                return []

            mine.snapshots.lines = lambda: lines
            mine.copy()
            mine.beside.wait()
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert owned.step == 3
    other = Seat(owned.address)
    assert other.take_up() and other.bits() == bits
    assert other.slots.write(4, b"", iter(()), patience=1.0)  # the turn of the dead is over


def test_the_scale_of_losses_is_kept_without_a_look_at_it(owned: Owned) -> None:
    one = Device(owned.address)
    scaler = one.precision.scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=7)
    assert one.precision.scaling() == scaler.state_dict()  # before its first loss
    scaler.scale(torch.tensor(1.0))
    assert scaler._scale is not None and scaler._growth_tracker is not None
    scaler._scale.fill_(64.0)
    scaler._growth_tracker.fill_(5)
    scaling = one.precision.scaling()
    assert scaling is not None and scaling["scale"] is scaler._scale
    assert scaling["_growth_tracker"] is scaler._growth_tracker
    one.ready()
    one.copy()
    one.beside.wait()
    other = Seat(owned.address)
    other.precision.scaler = torch.amp.GradScaler("cpu")
    assert other.take_up()
    assert other.precision.scaler.state_dict() == scaler.state_dict()
    assert list(scaler.state_dict()) == list(scaling)


def test_at_the_end_the_memory_is_given_back_after_the_copy_that_is_under_way(owned: Owned) -> None:
    one, was_read = Device(owned.address).ready(), threading.Event()

    def lines() -> list[Any]:
        time.sleep(0.3)
        was_read.set()
        return []

    one.snapshots.lines = lambda: lines
    one.copy()
    one.snapshots.close()
    assert was_read.is_set() and owned.step == 3
    assert not one.beside._memory and not one.beside._pinned


def test_a_host_without_threads_goes_on_without_copies(owned: Owned, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    one = Device(owned.address).ready()
    monkeypatch.setattr(threading.Thread, "start", start)
    one.copy()
    assert one.said[-1] == "no snapshots in memory: can't start new thread" and not one.snapshots.is_on
    one.beside.wait()
    one.snapshots.close()
    assert Slots(owned.address).open(9) is not None  # it is others' turn


def test_who_owns_the_memory_sees_that_it_is_written(owned: Owned) -> None:
    draft = Slots(owned.address).open(7)
    assert draft is not None and owned.is_written
    draft.close()
    assert not owned.is_written
    assert Slots(owned.address).open(7) is not None

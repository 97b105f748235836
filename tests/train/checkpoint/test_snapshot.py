"""The state in memory: what takes it up goes on as the one that it was taken from, bit for bit."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from train.checkpoint import packed, snapshot
from train.checkpoint.shared import Owned, Slots
from train.checkpoint.snapshot import Snapshots
from train.config import Config
from train.parallel.precision import Precision
from train.parallel.strategy import Spread
from train.parallel.world import World

CPU = torch.device("cpu")


class Net(nn.Module):
    """Whatever a state may hold: running statistics, tied weights, two types, channels last, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.low = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        self.register_buffer("nothing", torch.zeros(0))

    def forward(self, pictures: Tensor) -> Tensor:
        hidden = self.norm(self.conv(pictures)).mean((2, 3))
        return (self.two(torch.tanh(self.one(hidden))) * self.scale).sum() * self.low.double().mean()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)


class Seat:
    """One rank's place: its model, and what keeps its state."""

    def __init__(self, address: str, make: Any = _adam, size: int = 1, rank: int = 0, room: int = 1 << 40) -> None:
        torch.manual_seed(3)
        self.said: list[str] = []
        self.precision = Precision("fp32", CPU)
        self.model = Net()
        self.optimizer = make(self.model)
        world = World(rank, size, rank, CPU)
        self.strategy = Spread(world, Config(), self.precision)
        self.strategy._take(self.model)
        self.slots = Slots(address)
        self.snapshots = Snapshots(self.slots, "same", world, self.said.append, lambda: room)
        self.snapshots.attach(self.strategy, self.optimizer, self.precision)
        self.done = 0

    def forward(self) -> Tensor:
        return self.model(torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(self.done)))

    def agree(self) -> None:
        """What `Spread.agree_on_buffers` does on rank 0."""
        self.strategy.agreed = {id(buffer): buffer.clone() for buffer in self.model.buffers() if buffer.numel()}

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.forward().backward()
            self.agree()
            self.snapshots.begin_update()
            self.strategy.update(self.optimizer)
            self.done += 1
            self.snapshots.end_update(self.done)

    def take_up(self) -> bool:
        found = self.slots.newest()
        content = found and packed.read(self.slots, found[0], "same")
        if not content:
            return False
        packed.apply(content, self.model, self.optimizer, self.precision)
        self.done = content.step
        return True

    def bits(self) -> list[Any]:
        """All that the next step depends on."""
        state = self.optimizer.state_dict()["state"]
        tensors = [*self.model.state_dict().values(), *(t for one in state.values() for t in one.values())]
        return [(t.dtype, t.shape, t.contiguous().reshape(-1).view(torch.uint8).tolist()) for t in tensors if t.numel()]


@pytest.fixture
def owned() -> Iterator[Owned]:
    made = Owned()
    yield made
    made.ring()
    made.close()


@pytest.mark.parametrize("make", [_adam, _sgd, _plain])
def test_another_goes_on_from_it_bit_for_bit(owned: Owned, make: Any) -> None:
    one = Seat(owned.address, make)
    one.step(2)
    one.snapshots._due = 0.0
    one.step()
    other = Seat(owned.address, make)
    assert other.take_up() and other.done == 3
    assert other.bits() == one.bits()
    assert other.model.conv.weight.stride() == one.model.conv.weight.stride()
    assert other.model.two.weight is other.model.one.weight
    one.step(4)
    other.step(4)
    assert other.bits() == one.bits()


def test_what_is_taken_up_is_a_copy(owned: Owned) -> None:
    one = Seat(owned.address)
    one.step(2)
    other = Seat(owned.address)
    assert other.take_up()
    before = other.bits()
    one.snapshots._due = 0.0
    one.step()
    one.snapshots._due = 0.0
    one.step()  # both buffers are new
    assert other.bits() == before


def test_nothing_is_taken_up_by_another_run_or_from_damaged_memory(owned: Owned) -> None:
    one = Seat(owned.address)
    one.step(2)
    assert packed.read(one.slots, 0, "other") is None
    found = packed.read(one.slots, 0, "same")
    assert found is not None and found.step == 2
    assert packed.read(one.slots, 1, "same") is None


def test_a_state_that_does_not_fit_is_refused_in_a_line(owned: Owned) -> None:
    one = Seat(owned.address, room=300_000)
    one.step(3)
    assert one.said == [
        "no snapshots in memory: 2 x 78 kB are more than half of the 300 kB that are left; "
        "a death costs the steps since the last checkpoint"
    ]
    assert (owned.size, owned.step) == (0, 0)


def test_what_it_takes_is_said_and_taken_once(owned: Owned) -> None:
    one = Seat(owned.address)
    one.step(3)
    assert one.said == ["snapshots in memory: 2 x 78 kB"]
    assert 70_000 < owned.size < 90_000
    again = Seat(owned.address, room=0)  # the next attempt: the memory is there
    again.step(5)
    assert not again.said
    assert owned.step >= 2


def test_more_memory_is_taken_for_a_state_that_grows(owned: Owned) -> None:
    one = Seat(owned.address)
    one.step(3)
    one.optimizer.state[one.model.one.bias]["late"] = torch.ones(250_000)
    for _ in range(2):
        one.snapshots._due = 0.0
        one.step()
    assert one.said == ["snapshots in memory: 2 x 78 kB", "snapshots in memory: 2 x 1.1 MB"]
    assert owned.step == 5
    again = Seat(owned.address)
    assert again.take_up() and again.bits() == one.bits()


def test_snapshots_take_a_hundredth_of_the_time(owned: Owned, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Seat(owned.address, _plain)
    one.step()
    now, taken = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def write(*_: Any) -> bool:
        taken.append(one.snapshots._at)
        now[0] += 0.02
        return True

    monkeypatch.setattr(one.snapshots, "_write", write)
    for _ in range(24):
        now[0] += 0.5
        one.step()
    # two hundredths of a second for each 1.98 s without: every fourth step
    assert taken == [2, 6, 10, 14, 18, 22]


def test_a_survivor_in_the_middle_of_a_step_leaves_the_state_of_the_step_before(owned: Owned) -> None:
    one = Seat(owned.address, size=2)
    one.slots.reserve(1 << 20)
    one.step(3)
    wanted = one.bits()
    one.snapshots._due = time.monotonic() + 3600
    one.forward().backward()  # changes running statistics, and waits for a peer that is gone
    assert one.bits() != wanted
    one.strategy.agreed = {}  # of the step that will never be made
    assert one.snapshots.leave_behind()
    other = Seat(owned.address)
    assert other.take_up() and other.done == 3
    assert other.bits() == wanted


class Counting(Net):
    """Keeps what is neither a parameter nor a buffer in its state."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, torch.zeros(2)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.calls, self.seen = state["calls"], state["seen"]

    def forward(self, pictures: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        return super().forward(pictures)


class Telling(Counting):
    """The same, as a tensor that is made when the state is asked for."""

    def get_extra_state(self) -> Any:
        return torch.tensor(self.calls)

    def set_extra_state(self, state: Any) -> None:
        self.calls, self.seen = int(state), torch.full((2,), float(state))


@pytest.mark.parametrize("net", [Counting, Telling])
def test_extra_state_that_a_forward_has_changed_is_left_as_it_was_after_the_step(
    owned: Owned, monkeypatch: pytest.MonkeyPatch, net: type[Counting]
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "Net", net)
    one = Seat(owned.address, size=2)
    one.slots.reserve(1 << 20)
    one.step(3)
    one.snapshots._due = time.monotonic() + 3600
    one.forward().backward()
    assert one.model.get_extra_state() is not None and one.model.calls == 4  # type: ignore[attr-defined]
    assert one.snapshots.leave_behind()
    other = Seat(owned.address)
    assert other.take_up() and other.done == 3
    model = other.model
    assert isinstance(model, Counting) and (model.calls, model.seen.tolist()) == (3, [3.0, 3.0])


def test_running_statistics_that_the_ranks_did_not_agree_on_are_not_left(owned: Owned) -> None:
    one = Seat(owned.address, size=2, rank=1)
    one.slots.reserve(1 << 20)
    one.agree = lambda: None  # type: ignore[method-assign]
    one.step(2)
    assert not one.snapshots.leave_behind()
    assert owned.step == 0


def test_half_an_update_is_never_left(owned: Owned) -> None:
    one = Seat(owned.address, size=2, rank=1)
    one.slots.reserve(1 << 20)
    one.step(2)
    one.forward().backward()
    one.agree()
    one.snapshots.begin_update()
    assert not one.snapshots.leave_behind()  # it died in there itself
    left: list[bool] = []
    bell = threading.Thread(target=lambda: left.append(one.snapshots.leave_behind()))
    bell.start()
    bell.join(timeout=0.2)
    assert bell.is_alive() and owned.step == 0
    one.strategy.update(one.optimizer)
    one.snapshots.end_update(3)
    bell.join(timeout=30)
    assert left == [True] and owned.step == 3
    other = Seat(owned.address)
    assert other.take_up()
    assert other.bits() == one.bits()


@pytest.mark.parametrize("swap", [lambda p, value: p.data.copy_(value), lambda p, value: p.detach().copy_(value)])
def test_weights_that_the_tasks_code_has_for_a_moment_are_not_left(owned: Owned, swap: Any) -> None:
    """Averages are swapped in for an evaluation, and out again."""
    one = Seat(owned.address, size=2, rank=1)
    one.slots.reserve(1 << 20)
    one.step(2)
    wanted = one.bits()
    with one.snapshots.aside:
        kept = one.model.one.weight.detach().clone()
        swap(one.model.one.weight, kept + 1)
        owned.ring()
        time.sleep(0.3)
        assert owned.step == 0
        swap(one.model.one.weight, kept)
    with one.snapshots.aside:  # it is the bell's turn before the next batch
        assert owned.step == 2
    other = Seat(owned.address)
    assert other.take_up() and other.bits() == wanted


def step_left(owned: Owned) -> int:
    """The step of the state that somebody leaves in memory within half a minute; 0: nobody has."""
    deadline = time.monotonic() + 30
    while not owned.step and time.monotonic() < deadline:
        time.sleep(0.01)
    return owned.step


def test_a_forward_that_takes_long_is_not_waited_for_where_no_weight_has_changed(
    owned: Owned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "_FORWARD", 0.1)
    one = Seat(owned.address, size=2, rank=1)
    one.slots.reserve(1 << 20)
    one.step(2)
    with one.snapshots.aside:
        owned.ring()
        assert step_left(owned) == 2


def test_memory_that_cannot_be_had_in_the_middle_of_an_update_holds_nothing_up(owned: Owned) -> None:
    one = Seat(owned.address, size=2)
    one.step()
    one.snapshots.begin_update()
    one.snapshots._give_up("no snapshots in memory: there is none")
    one.snapshots.end_update(2)
    with one.snapshots.aside:
        assert not one.snapshots.is_on


def test_the_bell_alone_makes_a_survivor_leave_its_state(owned: Owned) -> None:
    one = Seat(owned.address, size=2, rank=1)
    one.slots.reserve(1 << 20)
    one.step(2)
    assert owned.step == 0
    owned.ring()
    assert step_left(owned) == 2


def test_a_survivor_takes_the_memory_that_rank_0_had_not_come_to_take(owned: Owned) -> None:
    full = Seat(owned.address, size=2, rank=1, room=1)
    full.step()
    assert not full.snapshots.leave_behind() and owned.size == 0
    one = Seat(owned.address, size=2, rank=1)
    one.step()
    assert one.snapshots.leave_behind()
    other = Seat(owned.address)
    assert other.take_up() and other.done == 1
    assert other.bits() == one.bits()


def test_a_loss_that_is_not_finite_is_not_kept(owned: Owned) -> None:
    one = Seat(owned.address, size=2, rank=1)
    one.slots.reserve(1 << 20)
    one.snapshots.lines = lambda: lambda: None
    one.step(2)
    assert not one.snapshots.leave_behind()


def test_the_highest_step_of_the_survivors_wins(owned: Owned) -> None:
    seats = [Seat(owned.address, size=4, rank=rank) for rank in (1, 2, 3)]
    seats[0].slots.reserve(1 << 20)
    for seat, steps in zip(seats, (4, 5, 4), strict=True):
        seat.step(steps)
        assert seat.snapshots.leave_behind()
    other = Seat(owned.address)
    assert other.take_up() and other.done == 5
    assert other.bits() == seats[1].bits()


def test_what_cannot_be_copied_ends_snapshots_and_nothing_else(owned: Owned) -> None:
    one = Seat(owned.address)
    one.step()
    one.optimizer.state[one.model.scale]["lock"] = threading.Lock()
    one.step(4)
    assert len(one.said) == 2 and one.said[1].startswith("no snapshots in memory: cannot pickle")
    assert (one.done, owned.step) == (5, 0)

"""The state in memory: what takes it up goes on as the one that it was copied from, bit for bit."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from train.checkpoint import serialize, snapshot
from train.checkpoint.buffers import Buffers, SnapshotMemory, begin_of_tensors
from train.checkpoint.snapshot import Parts, Snapshots
from train.checkpoint.state_dict import TrainState
from train.config import Config
from train.parallel.precision import Precision
from train.parallel.strategy import Strategy
from train.parallel.world import World

pytestmark = pytest.mark.never_forgiven

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


class OneRank:
    """One rank's place: its model, and what copies its state after every step."""

    def __init__(
        self,
        address: str,
        room: int = 1 << 40,
        fingerprint: str = "same",
        part: int = 0,
        parts: int = 1,
    ) -> None:
        torch.manual_seed(3)
        self.said: list[str] = []
        self.precision, self.world = Precision("fp32", CPU), World(0, size=1, local_rank=0, device=CPU)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, amsgrad=True)
        strategy = Strategy(self.world, Config(), self.precision)
        strategy.place(self.model)
        self.parts = Parts([Buffers(address, place) for place in range(parts)], part)
        self.strategy, self.buffers, self.fingerprint = strategy, self.parts.all[part], fingerprint
        self.done, self.lag, self.is_written = 0, 0, True
        self.snapshots = Snapshots(
            self.parts, is_on=True, world=self.world, fingerprint=fingerprint, mark="mark", memory_left=lambda: room
        )
        self.state = TrainState(module=self.model, optimizer=self.optimizer, precision=self.precision)
        self.snapshots.attach(self.state, lambda: self.is_written, self.said.append)

    def step(self, count: int = 1) -> None:
        """As the loop does it: the request in the step, the losses of all steps but the last `lag` known after it."""
        for _ in range(count):
            self.model(torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(self.done))).backward()
            request = self.snapshots.copy_request()
            self.strategy.update(self.optimizer)
            self.done += 1
            self.snapshots.stats_read(self.done - self.lag, request)
            self.snapshots.after_step(self.done)

    def settle(self) -> None:
        """What a thread does comes to its end."""
        self.snapshots.wait()

    def take_up(self) -> bool:
        step = snapshot.newest_common(self.parts, self.world)
        content = snapshot.read(self.parts, world=self.world, step=step, fingerprint=self.fingerprint) if step else None
        if content is None:
            return False
        serialize.apply(content, self.state)
        self.done = content.step
        return True

    def bits(self) -> list[Any]:
        """All that the next step depends on."""
        state = self.optimizer.state_dict()["state"]
        tensors = [*self.model.state_dict().values(), *(t for one in state.values() for t in one.values())]
        return [(t.dtype, t.shape, t.contiguous().reshape(-1).view(torch.uint8).tolist()) for t in tensors if t.numel()]


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """After every step, however long a copy, or a step, takes."""
    monkeypatch.setattr(snapshot, "SHARE", float("inf"))
    monkeypatch.setattr(snapshot, "time", SimpleNamespace(monotonic=lambda: 0.0, perf_counter=time.perf_counter))


@pytest.fixture
def memory() -> Iterator[SnapshotMemory]:
    made = SnapshotMemory()
    yield made
    made.close()


def test_another_goes_on_from_it_bit_for_bit(memory: SnapshotMemory) -> None:
    one = OneRank(memory.address)
    one.step(4)
    other = OneRank(memory.address)
    assert other.take_up() and other.done == memory.step == 4
    before = one.bits()
    assert other.bits() == before
    assert other.model.conv.weight.stride() == one.model.conv.weight.stride()
    assert other.model.two.weight is other.model.one.weight
    one.step(4)  # both buffers are new, and what was taken up is a copy
    assert other.bits() == before
    other.step(4)
    assert other.bits() == one.bits()


@pytest.fixture
def three() -> Iterator[SnapshotMemory]:
    made = SnapshotMemory(3)
    yield made
    made.close()


def test_ranks_that_hold_the_same_state_copy_equal_parts_of_it(three: SnapshotMemory) -> None:
    ranks = [OneRank(three.address, part=part, parts=3) for part in range(3)]
    for one in ranks:
        one.step(4)
    sizes = [serialize.serialize(one.state, "same", 4, "mark", part, 3).length for part, one in enumerate(ranks)]
    whole = serialize.serialize(ranks[0].state, "same", 4, "mark").length
    assert sum(sizes) == whole and max(sizes) - min(sizes) < 3 * 64
    other = OneRank(three.address, part=1, parts=3)
    assert other.take_up() and other.done == three.step == 4 and other.bits() == ranks[0].bits()
    for one in ranks[:2]:  # the third dies before it seals its part
        one.step()
    assert three.step == 4 and other.take_up() and other.done == 4
    ranks[2].optimizer.state[ranks[2].model.scale]["more"] = torch.ones(100)
    ranks[2].step()
    assert three.step == 5 and not other.take_up()  # the tensors of the third have other places


def test_a_copy_that_is_damaged_or_of_other_ranks_is_not_used(memory: SnapshotMemory) -> None:
    one = OneRank(memory.address)
    one.step(4)
    assert one.buffers.steps.keys() == {3, 4}
    slot = one.buffers.steps[4]
    one.buffers.map()[slot][begin_of_tensors(len(one.buffers.read(slot)[0]))] ^= 1
    assert not one.take_up()
    assert one.buffers.steps.keys() == {3}  # the damaged one is forgotten, and the one before serves
    assert OneRank(memory.address).take_up()
    assert not OneRank(memory.address, fingerprint="of rank 1 of 3").take_up()
    assert not one.buffers.steps


def test_where_memory_is_short_there_are_no_copies_and_a_line_says_so(memory: SnapshotMemory) -> None:
    one = OneRank(memory.address, room=300_000)
    one.step(3)
    assert one.said == [
        "no snapshots in memory: 2 x 76.5 KiB are more than half of the 293 KiB that are left; "
        "a death now costs the steps since the last checkpoint"
    ]
    assert (one.buffers.taken, memory.step, one.snapshots.copy_request()) == (0, 0, -1)


def test_what_it_takes_is_said_and_taken_once(memory: SnapshotMemory) -> None:
    one = OneRank(memory.address)
    one.step(3)
    assert one.said == ["snapshots in memory: 2 x 76.5 KiB"]
    again = OneRank(memory.address, room=0)  # the next attempt: the memory is there
    again.step(5)
    assert not again.said and memory.step == 5


def test_more_memory_is_taken_for_a_state_that_grows(memory: SnapshotMemory) -> None:
    one = OneRank(memory.address)
    one.step(3)
    one.optimizer.state[one.model.one.bias]["late"] = torch.ones(250_000)
    one.step(2)
    assert one.said == [f"snapshots in memory: 2 x {size}" for size in ("76.5 KiB", "1 MiB")]
    assert memory.step == 5
    again = OneRank(memory.address)
    assert again.take_up() and again.bits() == one.bits()


def test_copies_take_a_hundredth_of_the_time(memory: SnapshotMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "SHARE", 0.01)
    now, copied, real = 0.0, list[int](), serialize.serialize

    def slow(*state: Any) -> Any:
        nonlocal now
        now += 0.02
        copied.append(state[2])
        return real(*state)

    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(snapshot.time, name, lambda: now)
    one = OneRank(memory.address)
    one.step()
    monkeypatch.setattr(serialize, "serialize", slow)
    for _ in range(24):
        now += 0.5
        one.step()
    # two hundredths of a second for each 1.98 s without: every fourth step
    assert copied == [2, 6, 10, 14, 18, 22]
    now += 10.0
    copied.clear()
    for _ in range(5):  # a hundredth of a step, and less
        now += 2.0
        one.step()
    assert copied == [26, 27, 28, 29, 30]


def test_a_copy_counts_once_its_loss_is_known(memory: SnapshotMemory) -> None:
    """As on a GPU, where losses are read a step later."""
    one = OneRank(memory.address)
    one.step(2)
    one.lag = 1
    one.step()
    bits = one.bits()
    assert memory.step == 2  # of step 3 nobody knows whether the loss is finite
    assert one.snapshots.copy_request() == -1  # no other copy until that of step 3 is sealed
    one.snapshots._requested.pop()
    one.step()
    one.settle()
    assert memory.step == 3
    other = OneRank(memory.address)
    assert other.take_up() and other.bits() == bits


def test_a_rank_whose_lines_the_disk_refuses_refuses_copies(memory: SnapshotMemory) -> None:
    one = OneRank(memory.address)
    one.step(2)
    one.is_written = False
    assert one.snapshots.copy_request() == -1
    one.snapshots.stats_read(3, 1.0)  # refused after the request
    one.snapshots.after_step(3)
    assert memory.step == 2
    one.is_written = True
    one.done = 3
    one.step()
    one.settle()
    assert memory.step == 3  # its copy, like the others'; until it is sealed there is no next one
    one.step()
    assert memory.step == 5


def test_what_cannot_be_copied_ends_copies_and_nothing_else(memory: SnapshotMemory) -> None:
    one = OneRank(memory.address)
    one.step(2)
    one.optimizer.state[one.model.scale]["lock"] = threading.Lock()
    one.step(4)
    assert len(one.said) == 2 and one.said[1].startswith("no snapshots in memory: cannot pickle")
    assert (one.done, memory.step, one.snapshots.copy_request()) == (6, 2, -1)


def test_a_rank_that_is_not_ready_is_asked_again_in_the_next_step(memory: SnapshotMemory) -> None:
    one = OneRank(memory.address)
    one.step(2)
    assert one.snapshots.copy_request() == 1
    one.snapshots.stats_read(3, 0.0)  # another rank has refused
    one.snapshots.after_step(3)
    assert memory.step == 2 and one.snapshots.copy_request() == 1


def test_the_scale_of_losses_is_kept_without_a_look_at_it(memory: SnapshotMemory) -> None:
    one = OneRank(memory.address)
    scaler = one.precision.scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=7)
    assert one.precision.scaling() == scaler.state_dict()  # before its first loss
    scaler.scale(torch.tensor(1.0))
    assert scaler._scale is not None and scaler._growth_tracker is not None
    scaler._scale.fill_(64.0)
    scaler._growth_tracker.fill_(5)
    scaling = one.precision.scaling()
    assert scaling is not None and scaling["scale"] is scaler._scale
    assert scaling["_growth_tracker"] is scaler._growth_tracker
    one.snapshots.after_step(1)
    one.snapshots.copy_request()
    one.snapshots.stats_read(2, 1.0)
    one.snapshots.after_step(2)
    other = OneRank(memory.address)
    other.precision.scaler = torch.amp.GradScaler("cpu")
    assert other.take_up()
    assert other.precision.scaler.state_dict() == scaler.state_dict()


def test_each_thread_that_locks_memory_or_lets_it_go_uses_the_gpu_of_its_rank(
    memory: SnapshotMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread begins on the first GPU, and would open it, on every rank."""
    used, current = list[tuple[str, Any]](), threading.local()

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
    one = OneRank(memory.address)
    one.world.device = torch.device("cuda", 1)
    one.snapshots.after_step(1)  # a thread takes the memory, and locks it
    one.settle()
    one.snapshots.close()
    assert used == [(what, 1) for what in ("lock", "lock", "let go", "let go")]

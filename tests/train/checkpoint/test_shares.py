"""Where each rank has a part of the state, a death costs the steps since all have copied theirs, and no bit."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.train.checkpoint.test_snapshots import ADAMW, LONGER, Kept
from tests.train.tiers import later
from train.checkpoint import shares
from train.checkpoint.beside import Beside
from train.checkpoint.shared import Owned, Slots
from train.checkpoint.shares import Shares
from train.config import Config
from train.parallel.precision import Precision
from train.parallel.strategy import Spread
from train.parallel.world import World
from train.record.metrics import Training

CPU = torch.device("cpu")
WAYS = {"fsdp": {"parallel__strategy": "fsdp"}, "hsdp": {"parallel__strategy": "hsdp", "parallel__shard_size": 2}}
FLAGS = LONGER | ADAMW | {"checkpoint__every_steps": 1000}


@pytest.fixture(scope="module")
def kept(steady: Any) -> Kept:
    steady.run("shares-fsdp2", 2, **FLAGS, **WAYS["fsdp"])
    return Kept(steady)


def begun(kept: Kept, name: str, reference: str) -> list[int]:
    """That it ended like the undisturbed one; where its attempts began."""
    assert kept.engine.outcome(name) == kept.engine.outcome(reference)
    attempts = kept.engine.station.record(name)["attempts"]
    assert all(one["end"] == "died" for one in attempts[:-1]), attempts
    return [attempt["from_step"] for attempt in attempts]


@pytest.mark.parametrize(("way", "ranks", "victim"), [("fsdp", 2, 0), *later(("fsdp", 2, 1), ("hsdp", 4, 3))])
def test_a_rank_killed_in_every_attempt_costs_the_steps_since_the_last_copy(
    kept: Kept, way: str, ranks: int, victim: int
) -> None:
    name = f"{way}-kept{victim}"
    if way == "hsdp":
        kept.engine.run("shares-hsdp4", 4, **FLAGS, **WAYS["hsdp"])
    kept.run(name, ranks, [f"11 {victim} SIGKILL"], **FLAGS, **WAYS[way])
    steps = begun(kept, name, f"shares-{way}{ranks}")
    # forty steps, no checkpoint among them; the first copy comes after the first step, the next one four later
    assert len(steps) > 2 and all(one < two <= one + 10 for one, two in itertools.pairwise(steps)), steps
    assert f"continuing after step {steps[-1]} as it was in memory" in kept.engine.said(name)


@pytest.mark.minutes
@pytest.mark.parametrize("place", ["written", *later("begin", "sealed")])
@pytest.mark.parametrize("victim", [0, *later(1)])
def test_a_rank_killed_while_they_copy_leaves_the_copy_before(kept: Kept, place: str, victim: int) -> None:
    name = f"copy-{place}{victim}"
    kept.run(name, 2, fault=f"snapshot.{place}@{victim}:2", times=3, **FLAGS, **WAYS["fsdp"])
    steps = begun(kept, name, "shares-fsdp2")
    # the second copy of each attempt; that of the others is whole, and of no use alone
    assert len(steps) == 4 and steps[0] == 0 < steps[1] <= 5, steps
    assert all(one < two for one, two in itertools.pairwise(steps)), steps


class Alone:
    """One rank that has all of a state."""

    def __init__(self, address: str, mark: str = "", room: int = 1 << 40) -> None:
        torch.manual_seed(3)
        self.said: list[str] = []
        self.model, self.world, precision = nn.Linear(3, 2), World(0, 1, 0, CPU), Precision("fp32", CPU)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        strategy = Spread(self.world, Config(), precision)
        strategy._take(self.model)
        self.slots = Slots(address)
        self.shares = Shares(self.slots, "same", self.world, self.said.append, lambda: room, mark)
        self.shares.attach(strategy, self.optimizer, precision)

    def step(self, number: int) -> None:
        self.model(torch.ones(1, 3)).sum().backward()
        self.optimizer.step()
        self.shares.end_update(number)


@pytest.fixture
def owned() -> Iterator[Owned]:
    made = Owned()
    yield made
    made.close()


def test_a_part_is_copied_by_its_device_while_steps_go_on(owned: Owned) -> None:
    """The device is a CPU here, which copies at once; what follows is later, as on a GPU."""
    one, was_read = Alone(owned.address), threading.Event()
    beside = one.shares._beside = Beside(one.slots, CPU)

    def lines() -> list[Training]:
        assert was_read.wait(30)
        return []

    one.shares.lines = lambda: lines
    one.step(1)  # takes the memory, and locks it
    assert beside._thread is not None
    beside._thread.join()
    one.step(5)
    weight = one.model.weight.detach().clone()
    for number in (6, 7, 8):
        one.step(number)
    assert beside.is_busy and not owned.step
    was_read.set()
    one.step(9)  # the next one is due, which waits for the one before
    beside.wait()
    assert one.slots.steps.keys() == {5, 9} and beside.cost > 0
    one.shares._due = 10
    one.step(10)
    beside.wait()
    assert one.slots.steps.keys() == {9, 10}
    content = shares.take_up(one.slots, one.world, 10, "same")
    assert content is not None
    kept = content.walk(content.state["model"])
    assert torch.equal(kept["weight"], one.model.weight) and not torch.equal(kept["weight"], weight)


def test_a_part_that_its_device_cannot_copy_is_the_end_of_it_on_all_ranks(owned: Owned) -> None:
    def lines() -> list[Training]:
        raise OSError("the device is lost")

    one = Alone(owned.address)
    beside = one.shares._beside = Beside(one.slots, CPU)
    one.step(1)
    assert beside._thread is not None
    beside._thread.join()
    one.shares.lines = lambda: lines
    one.step(5)
    beside.wait()
    one.step(9)
    assert one.said[-1] == "no more snapshots in memory: the device is lost" and not one.shares.is_on


def test_only_what_all_parts_have_is_kept() -> None:
    made = Owned(3)
    try:
        parts = [Slots(made.address, part) for part in range(3)]
        with pytest.raises(FileNotFoundError):
            Slots(made.address, 3)
        for part in parts:
            part.write(4, b"plain", iter([b"tensors"]))
        for part in parts[:2]:
            part.write(9, b"plain", iter([b"tensors"]))
        assert made.step == 4 and parts[0].steps.keys() == {4, 9}
        parts[2].write(9, b"plain", iter([b"tensors"]))
        assert made.step == 9
        parts[1].wipe(parts[1].steps[9])
        parts[2].wipe(parts[2].steps[4])
        assert made.step == 0
    finally:
        made.close()


def test_a_damaged_part_is_not_taken_up_nor_what_it_belongs_to(owned: Owned) -> None:
    one = Alone(owned.address)
    for number in range(1, 6):
        one.step(number)
    assert owned.step == 5 and shares.newest(one.slots, one.world, 5) == 5
    content = shares.take_up(one.slots, one.world, 5, "same")
    assert content is not None and content.step == 5 and one.slots.steps.keys() == {5}
    assert shares.take_up(one.slots, one.world, 5, "another") is None and owned.step == 0
    one.shares._due = 9
    one.step(9)
    one.shares._due = 10
    one.step(10)
    assert one.slots.steps.keys() == {9, 10}
    fd = os.open(owned.address.split(":")[one.slots.steps[10]], os.O_RDWR)
    os.pwrite(fd, b"x", os.fstat(fd).st_size // 2)
    os.pwrite(fd, b"\xff" * 8, 2 * 4096 + 4)
    os.close(fd)
    assert shares.take_up(one.slots, one.world, 10, "same") is None
    assert shares.newest(one.slots, one.world, 0) == 9  # the one before is whole
    content = shares.take_up(one.slots, one.world, 9, "same")
    assert content is not None and content.step == 9


def test_more_memory_is_taken_for_a_part_that_grows(owned: Owned) -> None:
    one = Alone(owned.address)
    one.step(1)
    one.optimizer.state[one.model.weight]["late"] = torch.ones(250_000)
    for number in range(2, 12):
        one.shares._due = min(one.shares._due, number)
        one.step(number)
    assert one.said[0].startswith("snapshots in memory") and "2 x 1.1 MB" in one.said[1] and len(one.said) == 2
    assert owned.step == 11


def test_what_is_older_than_a_checkpoint_is_forgotten_and_does_not_hold_up_copies(owned: Owned) -> None:
    one = Alone(owned.address)
    for number in range(1, 6):
        one.step(number)
    assert shares.newest(one.slots, one.world, 6) == 0 and not one.slots.steps
    one.shares._due = 3
    one.step(3)  # made anew, after the step of an older checkpoint
    assert one.slots.steps.keys() == {3}


def test_where_memory_is_short_nothing_is_kept_and_a_line_says_so(owned: Owned) -> None:
    one = Alone(owned.address, room=10_000)
    for number in range(1, 9):
        one.step(number)
    (line,) = one.said
    assert "no snapshots in memory: 2 x" in line and not one.shares.is_on and owned.step == 0


def test_copies_take_a_hundredth_of_the_time(owned: Owned, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(shares.time, "monotonic", lambda: now)
    one = Alone(owned.address)
    copied = []
    copy = one.shares._copy

    def slow(step: int) -> None:
        nonlocal now
        now += 3.0
        copied.append(step)
        copy(step)

    one.shares._copy = slow  # type: ignore[method-assign]
    for number in range(1, 2001):
        now += 0.5
        one.step(number)
    assert copied[:2] == [1, 5]
    assert 3.0 * len(copied) / now < 0.02
    assert len(copied) >= 4

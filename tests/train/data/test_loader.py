"""How an epoch is cut into batches, and that who fetches them makes no difference."""

from __future__ import annotations

import collections
import errno
import itertools
import math
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from train.data.fetch import fetcher
from train.data.loader import Loader
from train.data.order import order
from train.data.plan import MicroBatch, Plan, Sharing, evaluation_micro_batches, micro_batches_of
from train.data.seeding import seed_compute
from train.data.to_device import to_device

pytestmark = pytest.mark.never_forgiven

CPU = torch.device("cpu")


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    batch = draw(st.integers(1, 40))
    size, seed, is_even = draw(st.integers(1, batch)), draw(st.integers(0, 9)), draw(st.booleans())
    return Plan(length=draw(st.integers(1, 300)), batch_size=batch, micro_batch_size=size, seed=seed, is_even=is_even)


class Noisy(Dataset[Any]):
    """Items with a draw from each generator of the host, and from some of its own."""

    def __init__(self) -> None:
        self.numpy, self.python, self.torch = np.random.default_rng(0), random.Random(0), torch.Generator()
        self.older = np.random.RandomState(0)

    def __len__(self) -> int:
        return 55

    def __getitem__(self, index: int) -> Any:
        own = [self.numpy.random(), self.python.random(), self.older.rand(), torch.rand(1, generator=self.torch).item()]
        return index, random.random(), np.random.rand(), torch.rand(2), torch.tensor(own)


def positions(plan: Plan, step: int) -> range:
    """Of a step's global batch, within its epoch."""
    start = step % plan.steps_per_epoch * plan.batch_size
    return range(start, start + plan.samples(step))


@settings(max_examples=100, deadline=None)
@given(plans())
def test_the_steps_of_an_epoch_tile_its_positions(plan: Plan) -> None:
    for epoch in (0, 3):
        steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
        assert [position for step in steps for position in positions(plan, step)] == list(range(plan.length))
        assert all(plan.epoch(step) == epoch for step in steps)
        assert all(plan.samples(step) == plan.batch_size for step in steps[:-1])
        assert 0 < plan.samples(steps[-1]) <= plan.batch_size


@settings(max_examples=60, deadline=None)
@given(plans(), st.integers(1, 6))
def test_the_shares_of_the_ranks_partition_each_global_batch(plan: Plan, world: int) -> None:
    last = 2 * plan.steps_per_epoch + 1
    pieces: dict[int, dict[int, list[int]]] = collections.defaultdict(dict)
    for rank in range(world):
        mine = list(micro_batches_of(plan, Sharing(rank, world), first=0, last=last))
        per_step = collections.Counter(micro.step for micro in mine)
        for step in range(last):
            assert per_step[step] == math.ceil(plan.micro_batches(step) / world)
        for micro in mine:
            if micro.is_repeated:
                assert micro.number == plan.micro_batches(micro.step) - 1 and micro.number % world != rank
                continue
            assert micro.number % world == rank
            assert micro.number not in pieces[micro.step]
            pieces[micro.step][micro.number] = micro.indices.tolist()
    for step in range(last):
        joined = [index for _, part in sorted(pieces[step].items()) for index in part]
        assert joined == order(plan.seed, plan.epoch(step), positions(plan, step), plan.length).tolist()
        sizes = [len(part) for _, part in sorted(pieces[step].items())]
        if plan.is_even:
            assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
            assert sizes[0] <= plan.micro_batch_size
        else:
            assert sizes[:-1] == [plan.micro_batch_size] * (len(sizes) - 1)
        assert plan.smallest(step) == sizes[-1]


def test_the_last_batch_is_short_and_none_is_dropped_or_padded() -> None:
    plan = Plan(length=55, batch_size=16, micro_batch_size=4)
    assert [plan.samples(step) for step in range(5)] == [16, 16, 16, 7, 16]
    assert [plan.micro_batches(step) for step in range(4)] == [4, 4, 4, 2]
    assert [len(Sharing(0, world).computed(plan.micro_batches(3))) for world in (1, 2, 3)] == [2, 1, 1]
    assert [len(micro.indices) for micro in micro_batches_of(plan, Sharing(), first=3, last=4)] == [4, 3]


def test_the_order_is_the_same_across_the_borders_of_the_chunks_it_is_computed_in() -> None:
    plan = Plan(length=70_000, batch_size=1000, micro_batch_size=1000, seed=4)
    epoch = np.concatenate(
        [micro.indices for micro in micro_batches_of(plan, Sharing(), first=0, last=plan.steps_per_epoch)]
    )
    assert np.array_equal(epoch, order(4, 0, np.arange(70_000), 70_000))


@settings(max_examples=40, deadline=None)
@given(plans(), st.data())
def test_starting_in_the_middle_gives_what_an_uninterrupted_run_would_have_had(plan: Plan, data: st.DataObject) -> None:
    last = 3 * plan.steps_per_epoch
    first = data.draw(st.integers(0, last - 1))

    def plain(micros: Iterator[MicroBatch]) -> list[Any]:
        return [(m.step, m.number, m.indices.tolist(), m.seed) for m in micros if m.step >= first]

    assert plain(micro_batches_of(plan, Sharing(1, 3), first=first, last=last)) == plain(
        micro_batches_of(plan, Sharing(1, 3), first=0, last=last)
    )


@settings(max_examples=60, deadline=None)
@given(plans(), st.integers(1, 6))
def test_evaluation_sees_each_sample_once_on_any_number_of_ranks(plan: Plan, world: int) -> None:
    shares = [list(evaluation_micro_batches(plan, Sharing(rank, world))) for rank in range(world)]
    everything = sorted(
        (micro.number, micro.seed, micro.indices.tolist())
        for share in shares for micro in share if not micro.is_repeated
    )  # fmt: skip
    alone = [(micro.number, micro.seed, micro.indices.tolist()) for micro in evaluation_micro_batches(plan, Sharing())]
    assert everything == alone
    assert [index for _, _, part in alone for index in part] == list(range(plan.length))


def test_no_two_micro_batches_share_a_seed_and_another_run_seed_changes_them_all() -> None:
    plan = Plan(length=55, batch_size=16, micro_batch_size=4, seed=0)
    seeds = [micro.seed for micro in micro_batches_of(plan, Sharing(), first=0, last=40)]
    seeds += [micro.seed for micro in evaluation_micro_batches(plan, Sharing())]
    assert len(set(seeds)) == len(seeds)
    others = {
        micro.seed
        for micro in micro_batches_of(
            Plan(length=55, batch_size=16, micro_batch_size=4, seed=1), Sharing(), first=0, last=40
        )
    }
    assert not others & set(seeds)


def fetched(rank: int, world: int, workers: int, first: int = 0) -> dict[tuple[int, int], Any]:
    plan = Plan(length=55, batch_size=16, micro_batch_size=4, seed=2)
    with Loader(Noisy(), {}, collate=None, workers=workers, device=CPU, dtype=None) as loader:
        stream = loader.batches(micro_batches_of(plan, Sharing(rank, world), first=first, last=9))
        return {(micro.step, micro.number): [part.tolist() for part in batch] for micro, batch in stream}


def test_batches_are_the_same_whoever_fetches_them() -> None:
    alone = fetched(0, 1, 0)
    assert fetched(0, 1, 2) == alone
    assert fetched(0, 3, 0) | fetched(1, 3, 0) | fetched(2, 3, 2) == alone
    later = fetched(0, 1, 0, first=5)
    assert later == {key: value for key, value in alone.items() if key[0] >= 5}


def test_augmentation_differs_between_items_micro_batches_and_epochs() -> None:
    draws = [tuple(torch_draw) for batch in fetched(0, 1, 0).values() for torch_draw in batch[3]]
    assert len(set(draws)) == len(draws)
    numpy_draws = [draw for batch in fetched(0, 1, 0).values() for draw in batch[2]]
    assert len(set(numpy_draws)) == len(numpy_draws)
    for draws in zip(*(own for batch in fetched(0, 1, 0).values() for own in batch[4]), strict=True):
        assert len(set(draws)) == len(draws)


def test_what_else_draws_random_numbers_does_not_change_a_batch() -> None:
    micro = next(micro_batches_of(Plan(length=55, batch_size=16, micro_batch_size=4), Sharing(), first=0, last=1))
    fetch = fetcher(Noisy(), None)
    first = fetch(micro)
    torch.rand(100), np.random.rand(3), random.random()
    again = fetch(micro)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_dropout_draws_from_other_numbers_than_augmentation() -> None:
    micro = next(micro_batches_of(Plan(length=55, batch_size=16, micro_batch_size=4), Sharing(), first=0, last=1))
    augmented = fetcher(Noisy(), None)(micro)[3][0]
    seed_compute(micro.seed, CPU)
    assert not torch.equal(torch.rand(2), augmented)
    seed_compute(micro.seed, CPU)
    once = torch.rand(5)
    seed_compute(micro.seed, CPU)
    assert torch.equal(torch.rand(5), once)


def test_tensors_fetched_as_a_whole_are_those_fetched_item_by_item() -> None:
    points, labels = torch.randn(55, 3), torch.arange(55)
    micro = next(micro_batches_of(Plan(length=55, batch_size=16, micro_batch_size=4), Sharing(), first=0, last=1))
    whole = fetcher(TensorDataset(points, labels), None)(micro)
    pairs = [(points[i], labels[i]) for i in range(55)]
    single = fetcher(pairs, None)(micro)
    assert all(torch.equal(a, b) for a, b in zip(whole, single, strict=True))


def test_parts_of_tensors_are_fetched_as_a_whole_too_and_nothing_else_that_only_looks_like_them() -> None:
    class Doubled(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return tuple(2 * item for item in super().__getitem__(index))

    points, labels = torch.randn(80, 3), torch.arange(80)
    micro = next(micro_batches_of(Plan(length=25, batch_size=16, micro_batch_size=8), Sharing(), first=0, last=1))
    part = Subset(Subset(TensorDataset(points, labels), range(10, 70, 2)), [*range(25, 0, -1)])
    for dataset in (part, Subset(Doubled(points, labels), range(30)), Subset(TensorDataset(points), [-1] * 25)):
        single = fetcher([dataset[index] for index in range(25)], None)(micro)
        whole = fetcher(dataset, None)(micro)
        assert [tensor.dtype for tensor in whole] == [tensor.dtype for tensor in single]
        assert all(torch.equal(a, b) for a, b in zip(whole, single, strict=True))


def test_a_row_that_a_part_names_and_the_tensors_lack_is_an_error_of_its_own() -> None:
    micro = next(micro_batches_of(Plan(length=3, batch_size=3, micro_batch_size=3), Sharing(), first=0, last=1))
    with pytest.raises(IndexError) as raised:
        fetcher(Subset(TensorDataset(torch.zeros(5)), [0, 9, 1]), None)(micro)
    assert getattr(raised.value, "sample", "") == "sample 1 of the training set"


def test_a_data_set_that_gives_many_items_at_once_is_asked_once() -> None:
    class Many(Noisy):
        asked: list[list[int]] = []  # noqa: RUF012

        def __getitems__(self, indices: list[int]) -> list[Any]:
            self.asked.append(indices)
            return [torch.tensor(index) for index in indices]

    micro = next(micro_batches_of(Plan(length=55, batch_size=16, micro_batch_size=4), Sharing(), first=0, last=1))
    assert fetcher(Many(), None)(micro).tolist() == micro.indices.tolist()
    assert Many.asked == [micro.indices.tolist()]


def test_a_collation_of_the_tasks_own_gets_the_items_in_order() -> None:
    micro = next(micro_batches_of(Plan(length=55, batch_size=16, micro_batch_size=4), Sharing(), first=0, last=1))
    assert fetcher(range(100, 155), tuple)(micro) == tuple(100 + micro.indices)


def test_conversion_reaches_floating_point_tensors_in_any_nesting_and_nothing_else() -> None:
    pair = collections.namedtuple("pair", "a b")
    batch = {"x": [torch.ones(2), (torch.ones(2).int(), "text")], "y": pair(torch.ones(1), 3)}
    moved = to_device(batch, CPU, dtype=torch.float64)
    assert moved["x"][0].dtype == moved["y"].a.dtype == torch.float64
    assert moved["x"][1][0].dtype == torch.int32
    assert moved["x"][1][1] == "text"
    assert isinstance(moved["y"], pair) and moved["y"].b == 3


def test_what_a_collation_of_ones_own_may_return_keeps_its_kind() -> None:
    lists = collections.defaultdict(list, {"x": [torch.ones(2)]})
    moved = to_device(lists, CPU, dtype=torch.float64)
    assert type(moved) is collections.defaultdict and moved["other"] == [] and moved["x"][0].dtype == torch.float64
    assert lists["x"][0].dtype == torch.float32
    packed = pack_sequence([torch.ones(3, 1), torch.ones(2, 1)])
    there = to_device(packed, torch.device("meta"), dtype=torch.float64)
    assert there.data.device.type == "meta" and there.data.dtype == torch.float64
    assert torch.equal(there.batch_sizes, packed.batch_sizes)


class Threads(Dataset[int]):
    """Items that tell on how many threads they are made: on several, some sums have other bits."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return torch.get_num_threads()


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_are_made_on_one_thread_whoever_makes_them(workers: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with Loader(Threads(), {}, collate=None, workers=workers, device=CPU, dtype=None) as loader:
            for _, batch in loader.batches(
                micro_batches_of(Plan(length=8, batch_size=4, micro_batch_size=4), Sharing(), first=0, last=2)
            ):
                assert batch.tolist() == [1] * 4
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_has_arrived_before_anything_is_asked_of_the_device(workers: int) -> None:
    seen: list[str] = []

    def on_device(batch: Any) -> Any:
        seen.append("on the device")
        return batch

    plan = Plan(length=55, batch_size=16, micro_batch_size=4)
    with Loader(range(55), {}, collate=None, workers=workers, device=CPU, dtype=None, on_device=on_device) as loader:
        for _ in loader.batches(micro_batches_of(plan, Sharing(), first=0, last=1), lambda: seen.append("arrived")):
            seen.append("taken")
    assert seen == ["arrived", "on the device", "taken"] * plan.micro_batches(0)


def test_data_that_are_kept_on_the_device_are_taken_there_once_and_give_the_same_batches() -> None:
    numbers, labels = torch.rand(55, 3), torch.arange(55)
    both = TensorDataset(numbers, labels)
    parts = Subset(Subset(both, range(5, 50)), range(2, 40)), Subset(both, range(50, 55))
    micros = [
        *micro_batches_of(Plan(length=38, batch_size=16, micro_batch_size=4), Sharing(), first=0, last=2),
        *evaluation_micro_batches(Plan(length=5, batch_size=4, micro_batch_size=4), Sharing()),
    ]
    with Loader(parts[0], {"": parts[1]}, collate=None, workers=0, device=CPU, dtype=None, keeps=True) as loader:
        for micro, (rows, of) in loader.batches(iter(micros)):
            assert torch.equal(of, torch.from_numpy(micro.indices) + (50 if micro.evaluation else 7))
            assert torch.equal(rows, numbers[of])
    elsewhere = torch.device("meta")
    with Loader(
        parts[0], {"": parts[1]}, collate=None, workers=0, device=elsewhere, dtype=torch.float64, keeps=True
    ) as loader:
        for micro, (rows, of) in loader.batches(iter(micros)):
            assert rows.device == of.device == elsewhere and rows.shape == (len(micro.indices), 3)
    assert numbers.device == CPU


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_data_set_reaches_the_run(workers: int) -> None:
    class Broken(Noisy):
        def __getitem__(self, index: int) -> Any:
            raise KeyError(f"no sample {index}")

    with Loader(Broken(), {}, collate=None, workers=workers, device=CPU, dtype=None) as loader:
        stream = loader.batches(
            micro_batches_of(Plan(length=55, batch_size=16, micro_batch_size=4), Sharing(), first=0, last=1)
        )
        with pytest.raises(KeyError, match="no sample"):
            next(stream)


def test_both_data_sets_are_fetched_in_the_order_of_the_plan_and_a_pass_may_be_left_for_another() -> None:
    plan, evaluation = (
        Plan(length=55, batch_size=16, micro_batch_size=4),
        Plan(length=9, batch_size=16, micro_batch_size=4),
    )
    with Loader(range(100, 155), {"": range(200, 209)}, collate=tuple, workers=2, device=CPU, dtype=None) as loader:
        workers = multiprocessing.active_children()
        assert len(workers) == 2

        def both() -> Iterator[MicroBatch]:
            yield from micro_batches_of(plan, Sharing(), first=0, last=1)
            yield from evaluation_micro_batches(evaluation, Sharing())
            yield from micro_batches_of(plan, Sharing(), first=1, last=2)

        first = [micro.indices + 100 for micro in micro_batches_of(plan, Sharing(), first=0, last=1)]
        for _ in range(2):
            stream = loader.batches(both())
            got = [list(batch) for _, batch in itertools.islice(stream, 6)]  # the rest is under way when it is left
            assert got == [*map(list, first), [200, 201, 202, 203], [204, 205, 206, 207]]
        assert multiprocessing.active_children() == workers
    assert not multiprocessing.active_children()


class Paced(Dataset[Any]):
    """Items that tell the epoch, and what was drawn when it began."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch, self.drawn, self.own = length, -1, -1.0, np.random.default_rng()

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.drawn = epoch, random.random() + self.own.random()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, float]:
        return self.epoch, self.drawn


def paced(workers: int, first: int = 0) -> dict[tuple[int, int, int], list[list[float]]]:
    """What is fetched from step `first` on, of parts of two data sets, with an evaluation of one after step 6."""
    one, other = Paced(40), Paced(30)
    train_set = ConcatDataset([Subset(Subset(one, range(40)), range(30)), other])
    plan = Plan(length=60, batch_size=16, micro_batch_size=8, seed=3)

    def micros() -> Iterator[MicroBatch]:
        yield from micro_batches_of(plan, Sharing(), first=first, last=6)
        yield from evaluation_micro_batches(
            Plan(length=10, batch_size=8, micro_batch_size=8), Sharing(), evaluation=1, epoch=plan.epoch(5)
        )
        yield from micro_batches_of(plan, Sharing(), first=6, last=11)

    evaluated = {"": Subset(one, range(30, 40))}
    with Loader(train_set, evaluated, collate=None, workers=workers, device=CPU, dtype=None) as loader:
        return {
            (micro.evaluation, micro.step, micro.number): torch.stack(batch).tolist()
            for micro, batch in loader.batches(micros())
        }


def test_a_data_set_is_told_its_epoch_before_its_first_fetch_whoever_fetches() -> None:
    alone = paced(0)
    for (evaluation, step, _), (epochs, drawn) in alone.items():
        assert set(epochs) == {1.0 if evaluation else step // 4} and len(set(drawn)) <= 2  # of two sets
    assert len({draw for _, drawn in alone.values() for draw in drawn}) >= 3
    assert paced(2) == paced(3) == alone
    later = {key: value for key, value in alone.items() if key[0] or key[1] >= 2}
    assert paced(0, first=2) == paced(2, first=2) == later


def test_a_worker_that_is_stuck_in_a_sample_is_ended_too() -> None:
    class Stuck(Noisy):
        def __getitem__(self, index: int) -> Any:
            if index == 0:
                time.sleep(1e6)
            raise KeyError("no sample")

    micros = [MicroBatch(step=0, number=number, indices=np.array([number]), seed=0) for number in (1, 0)]
    with (
        Loader(Stuck(), {}, collate=None, workers=2, device=CPU, dtype=None) as loader,
        pytest.raises(KeyError, match="no sample"),
    ):
        next(loader.batches(iter(micros)))
    assert not multiprocessing.active_children()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of torch's half-made iterator
def test_no_worker_is_left_where_the_system_has_no_room_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    fork, forks = os.fork, itertools.count(1)

    def limited() -> int:
        if next(forks) == 3:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return fork()

    monkeypatch.setattr(os, "fork", limited)
    with pytest.raises(BlockingIOError):
        Loader(Noisy(), {}, collate=None, workers=4, device=CPU, dtype=None)
    assert not multiprocessing.active_children()


def test_images_are_laid_out_channels_last_where_asked_for_and_nothing_else_changes() -> None:
    batch = {"image": torch.randn(2, 3, 4, 4), "label": torch.tensor([1, 2]), "name": ["a", "b"]}
    moved = to_device(batch, torch.device("cpu"), channels_last=True)
    assert moved["image"].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(moved["image"], batch["image"]) and moved["label"] is batch["label"]
    assert moved["name"] == ["a", "b"]
    plain = to_device(batch, torch.device("cpu"))
    assert plain["image"] is batch["image"]

"""The loader of a session: equal shares of global batches, the same ones after a resume, and DataLoader's options."""

from __future__ import annotations

import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, get_worker_info

from train.data.order import order
from train.data.sampling import weighted
from train.errors import Refused, TrainingFailed
from train.sessions.loader import Loader

pytestmark = pytest.mark.never_forgiven


class Calls:
    """A session that notes what its loader tells it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def begin_pass(self, epoch: int, batch: int) -> None:
        self.calls.append(("pass", epoch, batch))

    def check_epoch(self, epoch: int) -> None:
        self.calls.append(("epoch", epoch))

    def before_batch(self, step: int) -> None:
        self.calls.append(("step", step))

    def after_batch(self, batch: int) -> None:
        self.calls.append(("border", batch))

    def end_pass(self, epoch: int) -> None:
        self.calls.append(("end", epoch))

    def _stop_in_wait(self) -> NoReturn:
        raise SystemExit


class Noisy:
    """Items with a draw from each generator of the host, and from one that the data set keeps."""

    def __init__(self, length: int = 55) -> None:
        self.length, self.own = length, np.random.default_rng(0)
        self.begun_by: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), np.random.rand(), torch.rand(2), self.own.random()


def loader(dataset: Any, batch_size: int = 8, *, rank: int = 0, size: int = 1, **options: Any) -> Loader:
    return Loader(Calls(), dataset, batch_size=batch_size, seed=3, rank=rank, size=size, **options)


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(mine, its) for mine, its in zip(one, other, strict=True))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_ranks_share_each_global_batch_of_the_engine_s_order(size: int) -> None:
    shares = [
        [[*batch[0].tolist()] for epoch in (0, 1) for batch in made]
        for rank in range(size)
        for made in [loader(Noisy(), 6, rank=rank, size=size)]
    ]
    assert all(len(part) == 6 // size for share in shares for part in share)
    for number, parts in enumerate(zip(*shares, strict=True)):
        epoch, batch = divmod(number, 9)
        assert sorted(itertools.chain(*parts)) == sorted(order(3, epoch, range(batch * 6, batch * 6 + 6), 55).tolist())


def test_without_drop_last_the_short_batch_is_shared_equally() -> None:
    shares = [[[*b[0].tolist()] for b in loader(Noisy(54), 16, rank=rank, size=2, drop_last=False)] for rank in (0, 1)]
    assert [len(part) for part in shares[0]] == [len(part) for part in shares[1]] == [8, 8, 8, 3]
    assert sorted(itertools.chain(*shares[0], *shares[1])) == list(range(54))


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}], ids=str)
def test_a_pass_from_the_middle_gives_the_same_batches(options: dict[str, Any]) -> None:
    whole = loader(Noisy())
    expected = [[*whole], [*whole]]
    for epoch, batch in ((0, 2), (1, 5), (1, 6)):
        again = loader(Noisy(), **options)
        again.load_state_dict({"epoch": epoch, "batch": batch})
        assert (len(again), again.start) == (6, batch)
        found = [*again]
        assert len(found) == 6 - batch and all(map(same, found, expected[epoch][batch:]))


def test_what_a_session_is_told() -> None:
    made = loader(Noisy(25))
    made.go_to(2, 1)
    seen = []
    for _ in made:
        seen.append(made.state_dict())
    calls: Any = made._session
    assert calls.calls == [
        ("pass", 2, 1), ("step", 7), ("border", 2), ("step", 8), ("border", 3), ("end", 2),
    ]  # fmt: skip
    assert seen == [{"epoch": 2, "batch": 2}, {"epoch": 2, "batch": 3}]
    assert made.state_dict() == {"epoch": 3, "batch": 0}


def test_batches_look_as_those_of_a_dataloader() -> None:
    tensors = TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6))
    for dataset in (tensors, Subset(tensors, range(6)), [{"a": np.float32(1), "b": "x"}] * 6):
        (mine,), (its,) = loader(dataset, 6, shuffle=False), DataLoader(cast(Any, dataset), 6)
        assert type(mine) is type(its) and str(mine) == str(its)
    (joined,) = loader([1, 2, 3], 3, shuffle=False, collate_fn=np.array)
    assert isinstance(joined, np.ndarray) and joined.tolist() == [1, 2, 3]


def _begin(number: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.begun_by.append(number)  # type: ignore[attr-defined]


class Begun(Noisy):
    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None and info.dataset is self
        return self.begun_by[0], os.getpid()


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.minutes)])
def test_worker_init_fn_finds_the_data_set(context: str) -> None:
    made = loader(Begun(), num_workers=2, worker_init_fn=_begin, multiprocessing_context=context, prefetch_factor=1)
    assert [int(batch[0][0]) for batch in made] == [0, 1, 0, 1, 0, 1]


def test_a_data_set_is_asked_for_many_items_at_once() -> None:
    class Many(Noisy):
        def __getitems__(self, indices: list[int]) -> Any:
            return [f"{index}" for index in indices]

    assert [*loader(Many(4), 4, shuffle=False)] == [["0", "1", "2", "3"]]


class Broken(Noisy):
    def __getitem__(self, index: int) -> Any:
        if index == 17:
            raise ValueError("no such picture")
        return index


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_names_the_sample(workers: int) -> None:
    with pytest.raises(ValueError, match="no such picture") as caught:
        [*loader(Broken(), num_workers=workers)]
    text = str(caught.value) + str(getattr(caught.value, "__notes__", ""))
    assert "sample 17 of the training set" in text
    del caught
    gc.collect()  # the traceback holds the worker


def test_workers_leave_signals_to_the_rank_and_the_death_of_one_is_named() -> None:
    made = loader(Begun(), num_workers=1, worker_init_fn=_begin)
    batches = iter(made)
    (_, workers) = next(batches)
    for kind in (signal.SIGTERM, signal.SIGINT):
        os.kill(int(workers[0]), kind)
    next(batches)
    assert made._workers is not None
    (worker,) = made._workers.processes
    worker.kill()
    worker.join()
    with pytest.raises(RuntimeError, match=rf"worker \(pid {worker.pid}\) is killed by signal: Killed"):
        list(batches)


def test_workers_are_not_forked_beside_a_thread_of_the_script() -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait, name="refresh")
    thread.start()
    try:
        with pytest.raises(Refused, match=r"1 thread of the script .*\(refresh\).* or use num_workers=0$"):
            [*loader(Noisy(), num_workers=1)]
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}, {"pin_memory": True}], ids=str)
def test_a_batch_that_cannot_be_handed_over_ends_the_run_in_a_line(options: dict[str, Any]) -> None:
    began = time.monotonic()
    with pytest.raises(TrainingFailed, match=r"local object.* must be picklable, or use num_workers=0$"):
        [*loader(Noisy(), num_workers=1, collate_fn=lambda _: lambda: 1, **options)]
    assert time.monotonic() - began < 10


class Staged:
    """A data set whose items are what a script sets."""

    def __init__(self) -> None:
        self.stage, self.transforms = 0, [Noisy(1)]

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return self.stage, self.transforms[0].length, os.getpid()


def test_attributes_that_are_set_between_epochs_reach_workers_that_stay() -> None:
    dataset = Staged()
    made = loader(dataset, 2, num_workers=1, persistent_workers=True)

    def epoch() -> list[int]:
        (batch,) = made
        return [int(one[0]) for one in batch]

    first, second = epoch(), epoch()
    dataset.stage = 1
    third = epoch()
    dataset.transforms[0].length = 7
    fourth = epoch()
    assert first == second and [one[:2] for one in (first, third, fourth)] == [[0, 1], [1, 1], [1, 7]]
    assert len({one[2] for one in (first, third, fourth)}) == 3 and epoch() == fourth


def test_samples_are_drawn_by_their_weights() -> None:
    weights = np.arange(55) % 3
    expected = [weighted(weights.astype(float), seed=3, epoch=epoch)[:48].tolist() for epoch in (0, 1)]
    whole = loader(Noisy(), weights=torch.from_numpy(weights))
    again = loader(Noisy(), weights=weights.tolist(), num_workers=1)
    assert [[int(i) for batch in whole for i in batch[0]] for _ in (0, 1)] == expected
    again.load_state_dict({"epoch": 1, "batch": 4})
    assert [int(i) for batch in again for i in batch[0]] == expected[1][32:]
    assert expected[0] != expected[1] and all(index % 3 for index in expected[0])


def test_a_script_of_ddp_sets_the_epoch_by_the_sampler() -> None:
    made = loader(Noisy(), 6, rank=1, size=2)
    made.go_to(0, 4)
    made.sampler.set_epoch(0)
    assert made.start == 4
    made.sampler.set_epoch(2)
    assert made.state_dict() == {"epoch": 2, "batch": 0} and len(made.sampler) == 27


LEFT = """
import gc
import torch
from torch.utils.data import TensorDataset
from tests.train.sessions.test_session_loader import Broken, loader
try:
    [*loader(Broken(), num_workers=1)]
except ValueError:
    pass
gc.collect()  # its worker outlives it
made = loader(TensorDataset(torch.zeros(64)), num_workers=2, persistent_workers=True)
kept = iter(made)
next(kept)
raise KeyError
"""


def test_python_ends_although_workers_are_left() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LEFT], check=False, cwd=Path(__file__).parents[3], timeout=60, capture_output=True,
        text=True,
    )  # fmt: skip
    assert ended.returncode == 1 and "KeyError" in ended.stderr and "killed" not in ended.stderr


class Wrong(NamedTuple):
    words: str
    options: dict[str, Any]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(9))


class Epochs(Noisy):
    def set_epoch(self, epoch: int) -> None: ...


WRONG = [
    Wrong("takes no sampler: .* leave it out", {"sampler": [1, 2]}),
    Wrong("takes no batch_sampler: .* give batch_size", {"batch_sampler": [[1, 2]]}),
    Wrong("takes no generator", {"generator": torch.Generator()}),
    Wrong("takes no in_order=False", {"in_order": False}),
    Wrong("which Stream lacks: .* session.range", {"dataset": Stream()}),
    Wrong("persistent_workers=True: .*set_epoch", {"dataset": Epochs(), "persistent_workers": True, "num_workers": 1}),
    Wrong("batch_size 8 cannot be shared equally by 3 ranks; take 6 or 9", {"size": 3}),
    Wrong("batch_size 1 cannot be shared equally by 2 ranks; take 2", {"size": 2, "batch_size": 1}),
    Wrong("batch_size 0 is no size", {"batch_size": 0}),
    Wrong("55 samples has no batch of 56; take a smaller", {"batch_size": 56}),
    Wrong("the data set is empty", {"dataset": []}),
    Wrong("last batch of an epoch has 7 samples, which 2 ranks", {"size": 2, "drop_last": False}),
    Wrong("weights has the shape \\(3,\\); give one number for each of the 55", {"weights": [1, 2, 3]}),
    Wrong("weights has the negative number -1, at 1", {"weights": [1, -1] + [1] * 53}),
    Wrong("weights has a number that is not finite, at 2", {"weights": [1, 1, float("nan")] + [1] * 52}),
    Wrong("weights has only zeros", {"weights": np.zeros(55)}),
    Wrong("weights=list: give", {"weights": ["a"] * 55}),
    Wrong("shuffle=False with weights", {"weights": [1] * 55, "shuffle": False}),
    Wrong("session.loader: it got an unexpected keyword argument 'num_worker'", {"num_worker": 1}),
    Wrong("session.loader: persistent_workers option needs num_workers > 0", {"persistent_workers": True}),
]


@pytest.mark.parametrize(("words", "options"), WRONG)
def test_what_cannot_be_taken_is_refused_in_a_line(words: str, options: dict[str, Any]) -> None:
    with pytest.raises(Refused, match=words) as caught:
        loader(**{"dataset": Noisy(), **options})
    assert "\n" not in str(caught.value)


def test_a_position_that_no_epoch_has_is_refused() -> None:
    with pytest.raises(Refused, match="batch 7 of an epoch, which now has 6 batches"):
        loader(Noisy()).load_state_dict({"epoch": 0, "batch": 7})

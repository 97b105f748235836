"""Data sets that do not give what a batch is made of, and loader processes that end: who is to blame is named."""

from __future__ import annotations

import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from train import causes
from train.data.fetch import shape_error
from train.data.loader import Loader
from train.data.plan import MicroBatch
from train.errors import TrainingFailed
from train.supervise.diagnose import failure_of

CPU = torch.device("cpu")


class Made(Dataset[Any]):
    """Ten items, each what a function makes of its index."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def none(index: int) -> Any:
    return None if index == 7 else torch.zeros(3)


def longer(index: int) -> Any:
    return torch.zeros(4 if index == 7 else 3)


def used_up(index: int) -> Any:
    return next(iter([] if index == 7 else [index]))


def leaves(index: int) -> Any:
    return sys.exit("nothing there") if index == 7 else index


def failure(dataset: Any, indices: list[int], workers: int) -> str:
    """The reason that a run has failed for."""
    with Loader(dataset, {}, collate=None, workers=workers, device=CPU, dtype=None) as loader:
        with pytest.raises(Exception) as caught:
            list(loader.batches(iter([MicroBatch(step=0, number=0, indices=np.array(indices), seed=0)])))
        why = failure_of(caught.value, Path("own.py"))
    assert why["recurs"]
    return str(why["reason"]).removeprefix("own.py: ")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (none, "cannot be put into a batch: TypeError: default_collate: batch must contain"),
        (longer, "cannot be put into one batch with the others: RuntimeError: stack expects each tensor"),
        (used_up, "StopIteration"),
        (leaves, "SystemExit: nothing there"),
    ],
)
@pytest.mark.parametrize("indices", [[3, 2, 7, 5], [7, 2, 3]])
def test_the_sample_is_named_that_makes_no_batch(make: Any, said: str, indices: list[int]) -> None:
    reason = failure(Made(make), indices, 1)
    assert reason.startswith("sample 7 of the training set: ") and said in reason, reason


def test_no_sample_is_named_where_none_alone_is_to_blame() -> None:
    def join(items: list[Any]) -> Any:
        raise ValueError("never")

    assert shape_error(join, [1, 2]) is None
    found = shape_error(join, [1])
    assert found is not None and found[0] == 0

    def few(items: list[Any]) -> Any:
        if len(items) > 2:
            raise ValueError("too many")

    assert shape_error(few, [1, 2, 3]) is None


def test_a_data_set_that_gives_fewer_items_than_it_was_asked_for_is_an_error() -> None:
    class Fewer(Made):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [self[index] for index in indices if index != 7]

    reason = failure(Fewer(torch.tensor), [3, 7, 5], 0)
    assert "__getitems__ of Fewer gives 2 items for 3 indices" in reason


@pytest.mark.parametrize(
    ("ends", "said", "checks"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "is killed by signal: Killed", "memory,shared memory"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "is killed by signal: Segmentation fault", ""),
        (lambda: os.kill(os.getpid(), signal.SIGBUS), "is killed by signal: Bus error", "'shared memory'"),
        (lambda: os._exit(5), "has ended by itself, with exit code 5", ""),
    ],
)
def test_how_a_loader_process_died_is_said(ends: Callable[[], None], said: str, checks: str) -> None:
    with Loader(Made(lambda index: ends()), {}, collate=None, workers=1, device=CPU, dtype=None) as loader:
        with pytest.raises(RuntimeError) as caught:
            list(loader.batches(iter([MicroBatch(step=0, number=0, indices=np.array([1]), seed=0)])))
        pid = loader._workers.processes[0].pid
    assert "exited unexpectedly" not in "".join(traceback.format_exception(caught.value))
    why = failure_of(caught.value, None)
    assert why["reason"] == f"RuntimeError: DataLoader worker (pid {pid}) {said}"
    assert not why["recurs"]
    hint = causes.hint(why["reason"])
    assert checks in hint if checks else not hint


class Leaves:
    """An object that does what it is made with when it is pickled, or, if that is `back`, when it is unpickled."""

    def __init__(self, does: Callable[[], object]) -> None:
        self._does = does

    def __reduce__(self) -> Any:
        return (back, ()) if self._does is back else (self._does() and str, ())


def back() -> object:
    raise KeyError("not to be taken back")


def fails() -> object:
    raise ValueError("not to be given away")


def opens_no_more() -> object:
    """Let this process open no more files, whichever of those above stderr are closed later."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return True


KEPT = torch.ones(3)
"""A tensor whose file a worker does not close."""


def locally() -> None:
    class Own(ConnectionError):
        pass

    raise Own("of a class that only the worker has")


@pytest.mark.parametrize(
    ("collate", "said", "recurs"),
    [
        (lambda _: lambda: 1, "could not send a batch: Can't pickle local object", True),
        (lambda _: (one for one in ()), "could not send a batch: cannot pickle 'generator' object", True),
        (lambda _: 2 * torch.ones(3, requires_grad=True), "serialize non-leaf tensor which requires_grad", True),
        (lambda _: Leaves(fails), "could not send a batch: ValueError: not to be given away", True),
        (lambda _: Leaves(back), "from a data worker could not be received: KeyError: 'not to be taken", True),
        (lambda _: locally(), "RuntimeError: Own: of a class that only the worker has", True),
        # the worker pickles it, and cannot give its tensor to the rank that asks for it
        (lambda _: [KEPT, Leaves(opens_no_more)], "has ended: Too many open files", False),
        (lambda _: [Leaves(opens_no_more), torch.ones(3)], "could not send a batch: ", False),
    ],
)
def test_a_batch_that_a_worker_cannot_hand_over_is_an_error_with_its_cause(
    collate: Callable[[list[Any]], Any], said: str, recurs: bool
) -> None:
    with Loader(Made(int), {}, collate=collate, workers=1, device=CPU, dtype=None) as loader:
        stream = loader.batches(
            iter([MicroBatch(step=0, number=number, indices=np.array([number]), seed=0) for number in range(8)])
        )
        with pytest.raises(Exception) as caught:
            next(stream)
    error = caught.value
    why = failure_of(error, Path("own.py"))
    assert said in why["reason"]
    assert isinstance(error, TrainingFailed) or why["recurs"] == recurs
    if not recurs:
        assert "ulimit -n" in why["reason"] and "'open files'" in causes.hint(why["reason"])
    elif "Own" not in said:
        assert "--data.workers 0" in why["reason"]


def test_a_loader_process_that_ends_with_batches_of_its_own_on_the_way_is_named() -> None:
    with Loader(
        Made(lambda index: torch.full((9,), index)), {}, collate=None, workers=1, device=CPU, dtype=None
    ) as loader:
        stream = loader.batches(
            iter([MicroBatch(step=0, number=number, indices=np.array([number]), seed=0) for number in range(8)])
        )
        next(stream)
        (worker,) = loader._workers.processes
        worker.kill()
        worker.join()
        with pytest.raises(RuntimeError, match=rf"worker \(pid {worker.pid}\) is killed by signal: Killed"):
            list(stream)


def test_a_signal_that_comes_while_loader_processes_begin_ends_none_of_them() -> None:
    in_fork: list[int] = []

    def at_once() -> None:
        for number in in_fork:
            os.kill(os.getpid(), number)

    os.register_at_fork(after_in_child=at_once)
    in_fork += [signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP]
    try:
        loader = Loader(Made(int), {}, collate=None, workers=2, device=CPU, dtype=None)
    finally:
        in_fork.clear()
    with loader:
        micros = [MicroBatch(step=0, number=number, indices=np.array([number]), seed=0) for number in range(4)]
        assert [batch.item() for _, batch in loader.batches(iter(micros))] == [0, 1, 2, 3]
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP}

"""From positions to batches on the device.

A step consumes one global batch, cut into micro batches of a fixed size. What a micro batch holds is known from
(seed, epoch, step, micro batch) alone, so it makes no difference who fetches it: the training process or a loader
worker, this rank or another, before or after a restart.
"""

from __future__ import annotations

import ctypes
import functools
import math
import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from train.data.order import order, seed_of

_CHUNK = 16384
"""Positions whose order is computed at a time: a vectorised call costs little more for many than for one."""


@dataclass(frozen=True)
class Plan:
    """How a data set is cut into epochs, global batches and micro batches. All arithmetic, no state.

    Steps and epochs count from 0 here. The last global batch of an epoch is short when the division leaves a rest;
    no sample is dropped or repeated.
    """

    length: int
    batch_size: int
    micro_batch_size: int
    seed: int = 0

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.length / self.batch_size)

    def epoch(self, step: int) -> int:
        return step // self.steps_per_epoch

    def span(self, step: int) -> tuple[int, int]:
        """First position and the one after the last of the step's global batch within its epoch."""
        start = step % self.steps_per_epoch * self.batch_size
        return start, min(start + self.batch_size, self.length)

    def samples(self, step: int) -> int:
        """True number of samples in the step's global batch."""
        start, stop = self.span(step)
        return stop - start

    def micro_batches(self, step: int) -> int:
        """Number of micro batches in the step's global batch."""
        return math.ceil(self.samples(step) / self.micro_batch_size)

    def slots(self, step: int, world: int) -> int:
        """Forwards and backwards of every rank in this step; some ranks have no data in the last one."""
        return math.ceil(self.micro_batches(step) / world)


@dataclass(frozen=True)
class MicroBatch:
    """What to fetch: data set indices and the seed of everything random while fetching and computing them."""

    step: int
    number: int
    indices: npt.NDArray[np.int64]
    seed: int
    of_evaluation: bool = False


def micro_batches_of(plan: Plan, rank: int, world: int, first: int, last: int) -> Iterator[MicroBatch]:
    """The micro batches r, r + W, … of rank r of W in steps first <= step < last, in order."""
    chunk_key, chunk = (-1, -1), np.empty(0, dtype=np.int64)
    size = max(_CHUNK // plan.batch_size, 1) * plan.batch_size
    for step in range(first, last):
        epoch = plan.epoch(step)
        start, stop = plan.span(step)
        if chunk_key != (epoch, start // size):
            chunk_key = (epoch, start // size)
            begin = chunk_key[1] * size
            chunk = order(plan.seed, epoch, np.arange(begin, min(begin + size, plan.length)), plan.length)
        offset = start - chunk_key[1] * size
        for number in range(rank, plan.micro_batches(step), world):
            low = number * plan.micro_batch_size
            high = min(low + plan.micro_batch_size, stop - start)
            yield MicroBatch(
                step, number, chunk[offset + low : offset + high], seed_of(plan.seed, "train", epoch, step, number)
            )


def evaluation_micro_batches(plan: Plan, rank: int, world: int) -> Iterator[MicroBatch]:
    """The micro batches of one evaluation that are rank r's of W: every sample once, in the data set's order."""
    for number in range(rank, math.ceil(plan.length / plan.micro_batch_size), world):
        low = number * plan.micro_batch_size
        indices = np.arange(low, min(low + plan.micro_batch_size, plan.length))
        yield MicroBatch(0, number, indices, seed_of(plan.seed, "eval", number), of_evaluation=True)


def seed_host(seed: int) -> None:
    """Seed Python's, NumPy's and torch's CPU generators."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed & (2**63 - 1))


def seed_compute(seed: int, device: torch.device) -> None:
    """Seed every generator that a forward pass may draw from, apart from those of fetching."""
    seed = seed_of(seed, "compute")
    seed_host(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed & (2**63 - 1))


def fetcher(dataset: Any, collate: Callable[[list[Any]], Any] | None) -> Callable[[MicroBatch], Any]:
    """The function that turns a micro batch's indices into a batch."""
    if collate is None and type(dataset) is TensorDataset:
        tensors = dataset.tensors  # indexing once is ten times faster than item by item and collation

        def fetch_tensors(micro: MicroBatch) -> Any:
            indices = torch.from_numpy(micro.indices)
            return [tensor[indices] for tensor in tensors]

        return fetch_tensors
    join = collate or default_collate
    many = getattr(dataset, "__getitems__", None)

    def fetch(micro: MicroBatch) -> Any:
        seed_host(micro.seed)
        indices = micro.indices.tolist()
        return join(many(indices) if many is not None else [dataset[index] for index in indices])

    return fetch


class _Fetching(Dataset[Any]):
    """A data set whose items are whole micro batches: a MicroBatch is the index."""

    def __init__(self, train_set: Any, eval_set: Any, collate: Callable[[list[Any]], Any] | None) -> None:
        self._fetch = [fetcher(dataset, collate) for dataset in (train_set, eval_set)]

    def __getitem__(self, micro: Any) -> tuple[MicroBatch, Any]:
        return micro, self._fetch[micro.of_evaluation](micro)


class _Sampler:
    """What DataLoader asks for indices; every pass over the loader takes the plan that stands here then."""

    plan: Iterator[MicroBatch] = iter(())

    def __iter__(self) -> Iterator[MicroBatch]:
        return self.plan


def _start_worker(_: int, rank: int) -> None:
    """A stop signal to the process group must not reach the workers, or the save would wait for data for ever."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    # PR_SET_PDEATHSIG: a killed rank's workers go with it and release the run's lock
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != rank:  # it was killed before the line above
        os.kill(os.getpid(), signal.SIGKILL)


class Loader:
    """Fetches micro batches of the training and the evaluation set, in this process or in workers.

    The workers are forked here, for the whole life of the loader, and not whenever an evaluation begins: a fork copies
    one thread of its process and the locks of all. Where another thread held one at that moment (of the C library,
    say, while a checkpoint was being written), a worker waited for it for ever, once in some thousand evaluations.
    So make the loader before other threads have work.
    """

    def __init__(
        self,
        train_set: Any,
        eval_set: Any,
        collate: Callable[[list[Any]], Any] | None,
        workers: int,
        device: torch.device,
        dtype: torch.dtype | None,
    ) -> None:
        """
        Args:
            train_set: may be None, as may `eval_set`, where no micro batch of it is asked for.
            dtype: floating point tensors are converted to it; None leaves them.
        """
        self._device, self._dtype = device, dtype
        self._sampler = _Sampler()
        self._loader = DataLoader(
            _Fetching(train_set, eval_set, collate),
            sampler=self._sampler,  # anything to iterate over is enough
            batch_size=None,
            num_workers=workers,
            pin_memory=device.type == "cuda",
            worker_init_fn=functools.partial(_start_worker, rank=os.getpid()),
            prefetch_factor=4 if workers else None,
            persistent_workers=workers > 0,
            multiprocessing_context="fork" if workers else None,  # whatever the way in which this rank was started
        )
        self._iterator: Any = None
        others = set(multiprocessing.active_children())
        try:
            if workers:
                self._iterator = iter(self._loader)  # a first pass, over nothing, starts the workers
        finally:
            self._workers = [child for child in multiprocessing.active_children() if child not in others]
            if workers and self._iterator is None:  # no memory for another process, perhaps
                self.close()

    def batches(self, plan: Iterator[MicroBatch]) -> Iterator[tuple[MicroBatch, Any]]:
        """The batches of these micro batches, in their order, on the device. They are fetched ahead.

        One pass at a time: the next one ends it.
        """
        self._sampler.plan = plan
        for micro, batch in self._loader:
            yield micro, to_device(batch, self._device, self._dtype)

    def close(self) -> None:
        """End the workers.

        Not left to the garbage collector: a traceback may hold the iterator until Python ends, and Python would wait
        for ever for workers that ignore its SIGTERM, as would a worker that is stuck in a sample.
        """
        try:
            end_workers = getattr(self._iterator, "_shutdown_workers", None)
            if end_workers is not None:
                end_workers()
        finally:
            for worker in self._workers:
                worker.kill()
                worker.join(5)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def to_device(batch: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """The batch with every tensor in it (in lists, tuples, dicts, named tuples) moved to the device."""
    if isinstance(batch, torch.Tensor):
        if dtype is not None and batch.is_floating_point():
            return batch.to(device, dtype, non_blocking=True)
        return batch if batch.device == device else batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return type(batch)((key, to_device(value, device, dtype)) for key, value in batch.items())
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device, dtype) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device, dtype) for value in batch)
    if hasattr(batch, "to") and not isinstance(batch, np.ndarray):
        return batch.to(device)
    return batch

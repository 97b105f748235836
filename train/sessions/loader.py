"""The loader of a session: a DataLoader whose order is a function, so that it continues in the middle of an epoch.

One iteration is one global batch; each rank gets its equal part. Between two batches the loader tells the session that
the body of a batch is over, which is where the session saves and stops. Data workers are those of data/loader.py.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import functools
import logging
import multiprocessing
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from ..data import sampling, seeding, threads
from ..data.fetch import gatherer, is_indexed_at_once
from ..data.hand_over import Names, check_portable, pickled
from ..data.loader import STARTED, PlanSampler, Workers, begin_any_worker, open_files_again
from ..data.plan import MicroBatch, Plan, Sharing, micro_batches_of
from ..data.to_device import to_device
from ..errors import Refused
from ..signals import end_with_parent
from . import seeds
from .attributes import attributes_of
from .waiting import Stuck, Wait

log = logging.getLogger("train")

_NOT_TAKEN = {
    "sampler": "the session orders the samples; leave it out (shuffle=False keeps the order of the data set, "
    "weights=… does what WeightedRandomSampler does)",
    "batch_sampler": "the session makes the batches; give batch_size, the size of the global batch",
    "generator": "the session draws the order from its seed; leave it out",
}
"""Maps an option of DataLoader to why a session cannot take it and what to do."""
_NAMES = Names(whole="script", option="num_workers", none="num_workers=0", collate="collate_fn")
_END = object()
"""What comes after the last batch of a pass."""


class Listener(Protocol):
    """What a loader tells its session. A pass is one iteration over the loader."""

    def begin_pass(self, epoch: int, batch: int) -> None: ...
    def check_epoch(self, epoch: int) -> None: ...
    def before_batch(self, step: int) -> None: ...
    def after_batch(self, batch: int) -> None: ...
    def end_pass(self, epoch: int) -> None: ...
    def stop_in_wait(self) -> NoReturn: ...


class Loader:
    """Iterates over the global batches of an epoch. Takes what torch's DataLoader takes.

    `len()` is the number of batches in a whole epoch, also where a pass begins in the middle of one.
    """

    def __init__(
        self,
        session: Listener,
        dataset: Any,
        *,
        batch_size: int,
        seed: int,
        rank: int,
        size: int,
        shuffle: bool | None = None,
        weights: Any = None,
        drop_last: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        device: torch.device | str | None = None,
        wait: Wait | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            batch_size: samples in a global batch. Each of the `size` ranks gets an equal part of them.
            weights: how often each sample is drawn, relative to the others: an epoch has as many samples as the data
                set, drawn with replacement. Does what torch's WeightedRandomSampler does.
            device: batches are moved there; None leaves them on the host.
            wait: is told while a batch is waited for.
            options: other options of DataLoader.

        Raises:
            Refused: an option cannot be taken, or the ranks cannot share the batches equally.
        """
        _check_options(dataset, options)
        length = len(dataset)
        rest = _check_sizes(length, batch_size, size, drop_last=drop_last)
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self._session, self._wait = session, wait or Wait()
        self._device = None if device is None else torch.device(device)
        self._sharing = Sharing(rank, size)
        self._plan = Plan(
            length=length, batch_size=batch_size, micro_batch_size=batch_size // size, seed=seed, drop_last=drop_last,
            order=_order(length, seed, shuffle, weights),
        )  # fmt: skip
        # the last batch of an epoch is shared equally too, so its parts are smaller
        self._short_plan = dataclasses.replace(self._plan, micro_batch_size=rest // size) if rest else None
        self.sampler = Sampler(self)
        self._fetching, self._indices, self._options = _Fetching(dataset, collate_fn), PlanSampler(), options
        self._loader = _data_loader(self._fetching, self._indices, options)
        self._workers: Workers | None = None
        self._attributes: Any = None
        """What the script can set of the data set, as the workers got it."""
        self._has_forked = False
        if self._loader.num_workers:
            atexit.register(_end_workers, weakref.ref(self), os.getpid())
        self._epoch = self._batch = 0
        self._asked: collections.deque[MicroBatch] = collections.deque()
        self.note: Callable[[int, npt.NDArray[np.int64]], None] | None = None
        """Called with the number of each batch, counted over all epochs, and the indices of this rank's samples."""

    def __len__(self) -> int:
        return self._plan.steps_per_epoch

    @property
    def start(self) -> int:
        """Number of the batch that the next pass begins with: `enumerate(loader, loader.start)`. It is not 0 where a
        resume continues in the middle of an epoch."""
        return self._batch

    @property
    def facts(self) -> dict[str, int]:
        """What a position in an epoch depends on."""
        return {"samples": self._plan.length, "batch_size": self.batch_size, "batches": len(self)}

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, counted from 0. Inside `session.epochs()` it is set already.

        Raises:
            Refused: it is another one than that of session.epochs().
        """
        self._session.check_epoch(epoch)
        if epoch != self._epoch:
            self.go_to(epoch, 0)

    def state_dict(self) -> dict[str, int]:
        """Return where the pass is: the epoch, and the number of batches that it has given out."""
        return {"epoch": self._epoch, "batch": self._batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next pass continue there."""
        self.go_to(state["epoch"], state["batch"])

    def go_to(self, epoch: int, batch: int) -> None:
        """Let the next pass begin with this batch of this epoch.

        Raises:
            Refused: an epoch has fewer batches.
        """
        if not 0 <= batch <= len(self):
            raise Refused(
                f"the checkpoint is of batch {batch} of an epoch, which now has {len(self)} batches; use the data set "
                "and batch_size that the run began with"
            )
        self._epoch, self._batch = epoch, batch

    def __iter__(self) -> Iterator[Any]:
        epoch, first, session = self._epoch, self._batch, self._session
        session.begin_pass(epoch, first)
        step = epoch * len(self) + first
        batches = self._fetched(epoch, first)
        while (fetched := self._next(batches)) is not _END:
            batch = fetched if self._device is None else to_device(fetched, self._device)
            self._batch += 1
            if self.note is not None:
                self.note(step, self._asked.popleft().indices)
            session.before_batch(step)
            step += 1
            yield batch
            session.after_batch(self._batch)
        self._epoch, self._batch = epoch + 1, 0
        session.end_pass(epoch)

    def _next(self, batches: Iterator[Any]) -> Any:
        """Return the next batch, or _END. Does not wait for it forever once the run is asked to stop."""
        wait = self._wait
        try:
            try:
                wait.since = time.monotonic()
                return next(batches, _END)
            finally:
                wait.since = 0.0
        except Stuck:
            self._session.stop_in_wait()

    def problem(self) -> str:
        """Return why random generators that the data set keeps are not all seeded; '' if they are."""
        dataset, collate = self._fetching.dataset, self._fetching.collate
        return "" if is_indexed_at_once(dataset, collate) else seeding.search(dataset, collate)[1]

    def _micro_batches(self, epoch: int, first: int) -> Iterator[MicroBatch]:
        """Yield this rank's part of each batch of an epoch, from batch `first` on."""
        begin, end = epoch * len(self), (epoch + 1) * len(self)
        full = end - 1 if self._short_plan else end
        yield from micro_batches_of(self._plan, self._sharing, first=begin + first, last=full)
        if self._short_plan and begin + first < end:
            yield from micro_batches_of(self._short_plan, self._sharing, first=full, last=end)

    def _fetched(self, epoch: int, first: int) -> Iterator[Any]:
        micros = self._micro_batches(epoch, first)
        if self.note is not None:
            self._asked.clear()
            micros = self._noted(micros)
        if first == len(self):  # no workers for nothing
            return iter(())
        if not self._loader.num_workers and not self._loader.pin_memory:
            return map(self._fetching.fetch_here, micros)  # what DataLoader would do, without 20 us of its own a batch
        return self._fetch_by_loader(micros)

    def _noted(self, micros: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        for micro in micros:
            self._asked.append(micro)
            yield micro

    def _fetch_by_loader(self, micros: Iterator[MicroBatch]) -> Iterator[Any]:
        stays = self._loader.persistent_workers
        if not (stays and self._are_as_begun()):
            self._begin_workers()
        workers = self._workers
        assert workers is not None
        self._indices.plan = micros
        try:
            yield from workers.batches()
        except (Stuck, KeyboardInterrupt):
            workers.kill()
            raise
        except Exception:  # a traceback may hold this loader until Python ends
            workers.close()
            self._workers = None
            raise
        finally:
            if not stays:
                workers.close()

    def _begin_workers(self) -> None:
        """Let the next pass start new workers.

        Raises:
            Refused: the script has threads beside which the first ones would be forked.
        """
        if self._workers is not None and self._loader.persistent_workers:
            self._workers.close()
            self._loader = _data_loader(self._fetching, self._indices, self._options)  # else it keeps the old ones
        if self._loader.num_workers and _forks(self._loader):
            if not self._has_forked:
                threads.check(_NAMES)
            self._has_forked = True
        self._workers = Workers(self._loader, _NAMES)

    def _are_as_begun(self) -> bool:
        """Whether the script has set nothing of the data set since the workers that stay have started. Notes what it
        has set."""
        before, self._attributes = self._attributes, attributes_of(self._fetching.dataset, self._fetching.collate)
        return self._workers is not None and before == self._attributes


class Sampler:
    """The `sampler` of a loader, for what scripts of DDP call: `loader.sampler.set_epoch(epoch)`."""

    def __init__(self, loader: Loader) -> None:
        self._loader: Loader = weakref.proxy(loader)  # a cycle would keep its workers until the garbage collector comes

    def set_epoch(self, epoch: int) -> None:
        self._loader.set_epoch(epoch)

    def __len__(self) -> int:
        """Return the number of samples that this rank gets in an epoch."""
        loader = self._loader
        return sum(len(micro.indices) for micro in loader._micro_batches(0, 0))


def _forks(loader: DataLoader[Any]) -> bool:
    """Whether the workers of this loader are forked from this process."""
    return (loader.multiprocessing_context or multiprocessing).get_start_method() == "fork"


def _end_workers(loader: weakref.ref[Loader], rank: int) -> None:
    """End the workers when Python ends: it would wait for them forever, because they ignore its SIGTERM."""
    if os.getpid() != rank:  # a fork of the rank
        return
    left = loader()
    try:
        if left is not None and left._workers is not None:
            left._workers.close()
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would report those that are killed here
        for worker in multiprocessing.active_children():
            if worker in STARTED:  # its loader is gone
                worker.kill()
                worker.join(5)


def _order(length: int, seed: int, shuffle: bool | None, weights: Any) -> Callable[[int], sampling.Indices] | None:
    """Return the function that orders an epoch; None: the session's own.

    Raises:
        Refused: the weights are wrong.
    """
    if weights is None:
        return None if shuffle is None or shuffle else lambda _: np.arange(length)
    if shuffle is not None and not shuffle:
        raise Refused("shuffle=False with weights=…: samples are drawn by their weights; leave one of them out")
    try:
        given = torch.as_tensor(weights, dtype=torch.float64, device="cpu").numpy()
    except (TypeError, ValueError, RuntimeError):
        raise Refused(f"weights={type(weights).__name__}: give a list or tensor of one number a sample") from None
    if given.shape != (length,):
        raise Refused(f"weights has the shape {given.shape}; give one number for each of the {length} samples")
    if not np.isfinite(given).all() or not np.isfinite(given.sum()):
        raise Refused(f"weights has a number that is not finite, at {np.argmin(np.isfinite(given))}; give finite ones")
    if (given < 0).any():
        raise Refused(f"weights has the negative number {given.min():g}, at {np.argmin(given)}; give 0 to leave it out")
    if not given.any():
        raise Refused("weights has only zeros, so no sample can be drawn; give a positive number to some")
    drawn = given.copy()  # the script may change its own
    return functools.lru_cache(1)(lambda epoch: sampling.weighted(drawn, seed=seed, epoch=epoch))


def _check_options(dataset: Any, options: dict[str, Any]) -> None:
    """Raise Refused for what a session cannot keep exact."""
    for name, remedy in _NOT_TAKEN.items():
        if options.pop(name, None) is not None:
            raise Refused(f"session.loader takes no {name}: {remedy}")
    if not options.pop("in_order", True):
        raise Refused("session.loader takes no in_order=False: a resume could not repeat the order; leave it out")
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise Refused(
            f"session.loader needs a data set with __len__ and __getitem__, which {type(dataset).__name__} lacks: a "
            "stream has no position to resume from; read it with a DataLoader of your own in session.range()"
        )
    if options.get("persistent_workers") and hasattr(dataset, "set_epoch"):
        raise Refused(
            "persistent_workers=True: workers that stay do not see set_epoch() of the data set, and those of a resume "
            "would; leave it out"
        )


def _check_sizes(length: int, batch_size: int, size: int, *, drop_last: bool) -> int:
    """Check that the ranks can share every batch equally. Return the samples of a short last batch, or 0."""
    if not isinstance(batch_size, int) or batch_size < 1:
        raise Refused(f"batch_size {batch_size!r} is no size of a global batch; give a whole number of at least 1")
    if batch_size % size:
        below = batch_size // size * size
        near = f"{below} or {below + size}" if below else f"{size}"
        raise Refused(f"batch_size {batch_size} cannot be shared equally by {size} ranks; take {near}")
    if length < (batch_size if drop_last else 1):
        raise Refused(
            f"a data set of {length} samples has no batch of {batch_size}; take a smaller batch_size"
            if length else "the data set is empty"
        )  # fmt: skip
    rest = 0 if drop_last else length % batch_size
    if rest % size:
        raise Refused(
            f"the last batch of an epoch has {rest} samples, which {size} ranks cannot share equally; drop_last=True "
            "leaves it out"
        )
    return rest


def _data_loader(fetching: _Fetching, sampler: PlanSampler, options: dict[str, Any]) -> DataLoader[Any]:
    options = {**options, "worker_init_fn": _BeginWorker(os.getpid(), options.get("worker_init_fn"))}
    try:
        # anything to iterate over is enough for a sampler
        return DataLoader(
            fetching, None, sampler=sampler, collate_fn=_unchanged, generator=torch.Generator(), **options
        )
    except (TypeError, ValueError) as error:
        raise Refused(f"session.loader: {str(error).replace('DataLoader.__init__()', 'it')}") from None


def _unchanged(batch: Any) -> Any:
    """DataLoader's own function here would change arrays into tensors."""
    return batch


class _Fetching(Dataset[Any]):
    """A data set whose items are whole batches. A MicroBatch is the index."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None) -> None:
        self.dataset, self.collate = dataset, collate
        self._gather: Any = None  # made where it is used, because a worker that is spawned gets it by pickle

    def _fetch(self, micro: MicroBatch) -> Any:
        if self._gather is None:
            # tensors stay where they are; a script calls set_epoch itself
            self._gather = gatherer(self.dataset, self.collate, skip=False, keep=_unchanged, sets_epoch=False)
        batch, bad = self._gather(micro)
        if bad:
            error = bad[0].error
            error.add_note(f"({bad[0]})")
            raise error
        return batch

    def __getitem__(self, micro: MicroBatch) -> Any:
        """Fetch for a DataLoader, which has no workers if it only pins."""
        if get_worker_info() is None:
            return self.fetch_here(micro)
        try:
            batch = self._fetch(micro)
        except Exception as error:
            check_portable(error)
            raise
        return pickled(batch, _NAMES)

    def fetch_here(self, micro: MicroBatch) -> Any:
        """Fetch in the process that trains, where a data set may draw on a GPU too."""
        seeds.on_devices(micro.seed)
        return self._fetch(micro)


class _BeginWorker:
    """What a data worker does first."""

    def __init__(self, rank: int, users: Callable[[int], None] | None) -> None:
        self._rank, self._users = rank, users

    def __call__(self, number: int) -> None:
        begin_any_worker(_NAMES)
        if os.getppid() == self._rank:  # not with forkserver
            end_with_parent(self._rank)
            with contextlib.suppress(OSError):  # then the file stays shared, as under a bare DataLoader
                open_files_again()
        info: Any = get_worker_info()
        vars(info)["dataset"] = info.dataset.dataset  # the user's, as under a bare DataLoader
        if self._users is not None:
            self._users(number)

"""From micro batches to tensors on the device, fetched in this process or in workers."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import multiprocessing
import os
import signal
import stat
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from .. import breakpoints
from ..errors import Refused
from ..signals import POLITE, end_with_parent
from . import threads
from .fetch import EVALUATION, TRAINING, BadSample, gatherer
from .hand_over import (
    NO_FILES,
    OF_TASKS,
    Names,
    NotHandedOver,
    Pickled,
    check_portable,
    end_without_files,
    no_files,
    pickled,
    taken,
)
from .plan import MicroBatch
from .progress import set_progress
from .seeding import owned
from .to_device import AHEAD, OnDevice, pinned, prepared

_DYING = 1.0
"""Seconds to wait for the exit of a worker whose connection is gone."""
_PREFETCHED = 4
"""Maximum number of micro batches that a worker is asked for ahead."""
IGNORED = (*POLITE, signal.SIGHUP)
"""Signals that workers ignore: else a save would wait for their data forever."""
STARTED: weakref.WeakSet[Any] = weakref.WeakSet()
"""Data workers that this process has started. One may outlive its loader: after an error torch does not end it."""


class _Fetching(Dataset[Any]):
    """A dataset whose items are whole micro batches. A MicroBatch is the index."""

    def __init__(self, gather: list[Callable[[MicroBatch], tuple[Any, Sequence[BadSample]]]]) -> None:
        """Takes the functions that gather micro batches of the training set and of each evaluation set."""
        self._gather = gather

    def fetch(self, micro: MicroBatch) -> tuple[MicroBatch, Any, Sequence[BadSample]]:
        return micro, *self._gather[micro.evaluation](micro)

    def __getitem__(self, micro: Any) -> Pickled | NotHandedOver:
        """Fetch a micro batch in a worker."""
        try:
            _, batch, bad = self.fetch(micro)
        except Exception as error:
            check_portable(error)
            raise
        return pickled((micro, batch, [one.portable() for one in bad]))


class PlanSampler:
    """Gives DataLoader its indices. Every pass over the loader takes the current plan."""

    plan: Iterator[MicroBatch] = iter(())

    def __iter__(self) -> Iterator[MicroBatch]:
        return self.plan


@contextlib.contextmanager
def new_workers() -> Iterator[list[Any]]:
    """Context manager in which a DataLoader starts its workers. Its list has them afterwards, also if that fails."""
    others = set(multiprocessing.active_children())
    found: list[Any] = []
    # until a worker ignores them, torch's handler or the rank's would end it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    try:
        yield found
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        found += [child for child in multiprocessing.active_children() if child not in others]
        STARTED.update(found)


class Workers:
    """The workers of a DataLoader: starts them, takes what they send, names the death of one, and ends them."""

    def __init__(self, loader: DataLoader[Any], names: Names = OF_TASKS) -> None:
        self.processes: list[Any] = []
        self._loader, self._names = loader, names
        self._iterator: Any = None
        self._are_killed = False

    def begin(self) -> None:
        """Begin a pass over the loader. Starts the workers, unless they stay from the pass before."""
        if self.processes and self._loader.persistent_workers:
            self._iterator = iter(self._loader)  # outside of new_workers: it waits for them
            return
        try:
            with new_workers() as self.processes:
                self._iterator = iter(self._loader)
        except BaseException:  # no memory for another process, perhaps
            self.close()
            raise

    def batches(self) -> Iterator[Any]:
        """Begin a pass, and yield what it gives.

        Raises:
            TrainingFailed, OSError: see `taken`.
            RuntimeError: a worker has died.
        """
        try:
            self.begin()
            yield from map(taken, self._iterator)
        except (RuntimeError, OSError, EOFError) as error:
            how = self._death(error)
            if not how:
                raise
            raise RuntimeError(how) from None  # torch's words in the traceback would be read as another cause

    def _death(self, error: BaseException) -> str:
        """Return how a worker died, in torch's wording, if that caused the error; else ''.

        torch only says that a worker is gone, or that its data cannot be received.
        """
        if isinstance(error, RuntimeError) and not str(error).startswith(("DataLoader worker", "Pin memory thread")):
            return ""
        with contextlib.suppress(RuntimeError):  # torch raises it here if SIGCHLD comes here
            gone = connection.wait([worker.sentinel for worker in self.processes], _DYING)
            for worker in self.processes:  # its files are closed a little before its exit code is there
                if worker.sentinel in gone:
                    worker.join(_DYING)
        for worker in self.processes:
            code = worker.exitcode
            if code is not None and code < 0:
                return f"DataLoader worker (pid {worker.pid}) is killed by signal: {signal.strsignal(-code)}"
            if code in NO_FILES:
                why = f"{os.strerror(code)}; {no_files(self._names)}"
                return f"DataLoader worker (pid {worker.pid}) has ended: {why}"
            if code is not None:
                return f"DataLoader worker (pid {worker.pid}) has ended by itself, with exit code {code}"
        return ""

    def close(self) -> None:
        """End the workers.

        The garbage collector would be too late: a traceback may hold the iterator until Python ends, and Python would
        wait forever for workers that ignore its SIGTERM or are stuck in a sample.
        """
        if self._are_killed:
            return
        try:
            end_workers = getattr(self._iterator, "_shutdown_workers", None)
            if end_workers is not None:
                end_workers()
        finally:
            for worker in self.processes:
                worker.kill()
                worker.join(5)
            self.processes, self._iterator = [], None

    def kill(self) -> None:
        """End workers that are stuck, as this process ends: torch would give each of them five seconds."""
        self._are_killed = True  # torch's own end of workers could wait forever for a lock that a killed one held
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would report them
        for worker in self.processes:
            worker.kill()
        for worker in self.processes:
            worker.join(5)


class Loader:
    """Fetches micro batches of the training and evaluation sets, in this process or in workers.

    The workers are forked here, for the whole life of the loader, and not at each evaluation. A fork copies one thread
    of its process but the locks of all, so a worker could wait forever for a lock that another thread held. So make the
    loader before other threads have work, and before this process touches a GPU: a fork cannot use an inherited GPU.
    """

    def __init__(
        self,
        train_set: Any,
        eval_sets: Mapping[str, Any],
        *,
        collate: Callable[[list[Any]], Any] | None,
        workers: int,
        device: torch.device,
        dtype: torch.dtype | None,
        skipped: Callable[[Sequence[BadSample]], None] | None = None,
        channels_last: bool = False,
        on_device: OnDevice | None = None,
        made_by: Callable[..., Any] | None = None,
        keeps: bool = False,
    ) -> None:
        """
        Args:
            train_set: may be None where no micro batch of it is asked for.
            eval_sets: by name, in the order of their numbers.
            dtype: floating point tensors are converted to it; None leaves them.
            channels_last: whether tensors of four dimensions are laid out so.
            on_device: what becomes of a batch there; what it draws at random is seeded by the micro batch.
            made_by: the task's function that made the datasets; random generators in its file are seeded too.
            keeps: sets that are tensors in memory are copied to the device once. Without workers.
            skipped: called with samples that cannot be read, which are left out; None raises what the first one raised.

        Raises:
            Refused: a file that is open here cannot be opened by workers too, or the task has started a thread.
        """
        self._pin_for = torch.device("cpu") if keeps else device  # what is kept there is not pinned
        self._skipped = skipped
        own = owned(on_device, made_by) if on_device is not None else []
        self._prepared = functools.partial(
            prepared, device=device, dtype=dtype, channels_last=channels_last, on_device=on_device, own=own,
        )  # fmt: skip
        if workers:
            _check_files()
            threads.check()
        self.ahead = workers * _PREFETCHED + (AHEAD if workers else 0)
        """Maximum number of micro batches that are taken from a plan after the one that was asked for last."""
        self._sampler = PlanSampler()
        skips = skipped is not None
        sets = [(TRAINING, train_set), *((name or EVALUATION, each) for name, each in eval_sets.items())]
        # at the first batch, for no GPU is chosen yet; once, though training and evaluation may share a tensor
        keep = functools.cache(lambda tensor: tensor.to(device)) if keeps else None
        self._fetching = _Fetching([
            gatherer(each, collate, skip=skips, made_by=made_by, name=name, keep=keep)
            for name, each in sets
        ])  # fmt: skip
        self._loader = DataLoader(
            self._fetching,
            sampler=self._sampler,  # anything to iterate over is enough
            batch_size=None,
            num_workers=workers,
            worker_init_fn=functools.partial(begin_worker, rank=os.getpid()),
            prefetch_factor=_PREFETCHED if workers else None,
            persistent_workers=workers > 0,
            multiprocessing_context="fork" if workers else None,  # whatever the way in which this rank was started
        )
        self._workers = Workers(self._loader)
        if workers:
            self._workers.begin()  # a first pass, over nothing, starts them

    def batches(
        self, plan: Iterator[MicroBatch], arrived: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield the batches of these micro batches in order, on the device. They are fetched ahead.

        One pass at a time: the next pass ends this one. If samples were left out, the indices are those of the others;
        if none is left, the batch is None.

        Args:
            arrived: called when a requested batch has arrived, before the device gets work for it.
        """
        for planned, batch, bad in pinned(self._fetched(plan), self._pin_for, bool(self._workers.processes)):
            arrived()
            micro = planned
            if bad:
                if self._skipped is None:
                    raise bad[0].raised()
                self._skipped(bad)
                left_out = np.isin(planned.indices, [one.index for one in bad])
                micro = planned._replace(indices=planned.indices[~left_out])
            set_progress(micro.step, micro.epoch)
            yield micro, self._prepared(batch, micro.seed)

    def _fetched(self, plan: Iterator[MicroBatch]) -> Iterator[Any]:
        if not self._loader.num_workers:
            return map(self._fetch_here, plan)  # what DataLoader would do, without 20 us of its own a batch
        return self._fetch_there(plan)

    def _fetch_there(self, plan: Iterator[MicroBatch]) -> Iterator[Any]:
        """Fetch in workers."""
        self._sampler.plan = plan
        yield from self._workers.batches()

    def _fetch_here(self, micro: MicroBatch) -> Any:
        """Fetch in this process, on one thread as a worker does, because some sums have other bits on several
        threads."""
        before = torch.get_num_threads()
        if before == 1:
            return self._fetching.fetch(micro)
        torch.set_num_threads(1)
        try:
            return self._fetching.fetch(micro)
        finally:
            torch.set_num_threads(before)

    def close(self) -> None:
        """End the workers."""
        self._workers.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def begin_worker(_: int, rank: int) -> None:
    """Make this process a worker of the rank with this process id: leave stop signals to the rank, and open files
    again.

    A forked process shares its parent's open files and their read positions. Two workers that seek and read through one
    handle (a plain file, h5py, sqlite, zipfile) would get each other's bytes.
    """
    begin_any_worker()
    end_with_parent(rank)  # a killed rank's workers go with it and release the run's lock
    open_files_again()


def begin_any_worker(names: Names = OF_TASKS) -> None:
    """Do what a worker begins with however it was started."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    sys.excepthook = end_without_files
    breakpoints.refuse(f"a data worker has no terminal; use {names.none}")


def open_files_again() -> None:
    """Give a forked process its own read positions in the files that are open.

    Raises:
        OSError: a file cannot be opened again. The others are.
    """
    problem: OSError | None = None
    for fd in _open_files():
        try:
            own = _opened_again(fd)
        except OSError as error:
            problem = error
            continue
        if own is not None:
            os.dup2(own, fd, inheritable=False)
            os.close(own)
    if problem is not None:
        raise problem


def _check_files() -> None:
    """Check that workers can open this process's files again.

    Raises:
        Refused: a worker cannot open a file; the message names it.
    """
    for fd in _open_files():
        try:
            own = _opened_again(fd)
        except OSError as error:
            raise Refused(
                f"{Path(f'/proc/self/fd/{fd}').readlink()} is open here, but data workers cannot open it "
                f"({error.strerror}); open it in __getitem__ instead of datasets(), or use --data.workers 0"
            ) from None
        if own is not None:
            os.close(own)


def _opened_again(fd: int) -> int | None:
    """Open the file again at the same position. None: it was closed meanwhile, perhaps by the garbage collector.

    Raises:
        OSError: it cannot be opened.
    """
    try:
        access = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    except OSError:
        return None
    own = os.open(f"/proc/self/fd/{fd}", access | os.O_CLOEXEC)
    os.lseek(own, os.lseek(fd, 0, os.SEEK_CUR), os.SEEK_SET)
    return own


def _open_files() -> list[int]:
    """Return the regular files that are open here for reading, except standard input. A run's lock is open only for
    writing, because all who share it must hold it."""
    found = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the listing's own
            is_read = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY
            if fd > 2 and is_read and stat.S_ISREG(os.fstat(fd).st_mode):
                found.append(fd)
    return found

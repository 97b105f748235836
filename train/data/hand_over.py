"""How a data worker sends a fetched micro batch to its rank.

The worker pickles the batch itself, so that an error belongs to the micro batch. torch leaves the pickling to a thread
of the worker's queue: there an error is printed, the batch is lost, and the rank waits for it forever.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import resource
import sys
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from types import TracebackType
from typing import Any, NamedTuple

from ..errors import TrainingFailed, one_line

NO_FILES = (errno.EMFILE, errno.ENFILE)
"""Error numbers of a process, or a machine, that can open no more files."""
_OF_SYSTEM = ("Too many open files", "received 0 items of ancdata", "shared memory", "DataLoader worker")
"""Texts of torch's and Python's RuntimeErrors about files, memory and other processes. Python says `ancdata` if a file
was sent to a process that can open no more files."""
_CAUSE = 400
"""Maximum number of characters of a cause in a message."""


class Names(NamedTuple):
    """What the user of a loader calls its parts, for messages."""

    whole: str = "task"
    option: str = "--data.workers"
    none: str = "--data.workers 0"
    """How to have no workers."""
    collate: str = "collate()"


OF_TASKS = Names()


@dataclass(frozen=True)
class NotHandedOver:
    """What a worker sends instead of a micro batch that it cannot send."""

    reason: str
    is_of_system: bool

    def raised(self) -> Exception:
        """Return what the rank raises."""
        return OSError(self.reason) if self.is_of_system else TrainingFailed(self.reason)


class Pickled:
    """A fetched micro batch as a worker puts it into its queue; the rank gets what `_unpickled` returns."""

    def __init__(self, content: bytes, names: Names) -> None:
        self._content, self._names = content, names

    def __reduce__(self) -> tuple[Any, tuple[bytes, Names]]:
        return _unpickled, (self._content, self._names)


def pickled(fetched: Any, names: Names = OF_TASKS) -> Pickled | NotHandedOver:
    """Pickle what a worker has fetched. Tensors go into shared memory, and the bytes name that."""
    buffer = io.BytesIO()
    try:
        ForkingPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(fetched)
    except Exception as error:
        return _problem("a data worker could not send a batch", error, names)
    return Pickled(buffer.getvalue(), names)


def _unpickled(content: bytes, names: Names) -> Any:
    """Return what was fetched, in the rank. An error waits for its turn: the queue has no order."""
    try:
        return pickle.loads(content)
    except Exception as error:
        return _problem("a batch from a data worker could not be received", error, names)


def taken(received: Any) -> Any:
    """Return what a rank has received of a worker.

    Raises:
        TrainingFailed: it cannot be pickled, or unpickled.
        OSError: a process has no files or memory left for it, or the worker is gone.
    """
    if isinstance(received, NotHandedOver):
        raise received.raised()
    return received


def check_portable(error: Exception) -> None:
    """Replace an error that a worker cannot send, for example because its class is inside a function.

    Raises:
        RuntimeError: in place of that error.
    """
    try:
        pickle.dumps(type(error))
    except Exception:
        raise RuntimeError(one_line(f"{type(error).__name__}: {error}")) from error


def _problem(what: str, error: Exception, names: Names) -> NotHandedOver:
    cause = one_line(error)
    if "pickl" not in cause:
        cause = f"{type(error).__name__}: {cause}"
    is_of_system = isinstance(error, (OSError, EOFError, MemoryError)) or any(word in cause for word in _OF_SYSTEM)
    if getattr(error, "errno", None) in NO_FILES or "ancdata" in cause or "Too many open files" in cause:
        remedy = no_files(names)
    elif is_of_system:
        remedy = f"see also {names.none}"
    else:
        remedy = f"what {names.collate} returns must be picklable, or use {names.none}"
    return NotHandedOver(f"{what}: {cause[:_CAUSE]}; {remedy}", is_of_system)


def no_files(names: Names) -> str:
    """Say how many files a process may open, and what to do."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"this process may open {limit} files: raise ulimit -n, lower {names.option}, or put fewer tensors in a batch"
    )


def end_without_files(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End this worker if it can open no more files: a `sys.excepthook`.

    A rank fetches each tensor of a batch from a thread of the worker. If that thread can open no file, it would try
    forever, and the rank would wait. Python calls the hook for an error of that thread.
    """
    sys.__excepthook__(kind, error, trace)
    if isinstance(error, OSError) and error.errno in NO_FILES:
        os._exit(error.errno)

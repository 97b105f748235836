"""From the indices of a micro batch to a batch, and what happens to a sample that cannot be read."""

from __future__ import annotations

import bisect
import errno
import os
import pickle
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate

from ..errors import TrainingFailed, one_line
from .order import seed_of
from .progress import set_progress
from .seeding import Seed, owned, seed_host, seed_owned
from .shards import Shards

if TYPE_CHECKING:
    from .plan import MicroBatch

_OF_THE_FILE = {
    None, errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL,
    errno.ENAMETOOLONG,
}  # fmt: skip
"""Error numbers that recur with the same file. All others come from the machine, a disk or a network."""
TRAINING, EVALUATION = "training", "evaluation"
"""Names of the training set, and of an evaluation set without a name."""
_REASON = 300
"""Maximum number of characters of a reason."""


@dataclass
class BadSample:
    """A sample that cannot be read."""

    index: int
    set: str
    """The name of its dataset."""
    file: str
    """Its path; '' if the dataset does not have it."""
    reason: str
    error: Exception
    trace: str = ""
    """Traceback of the process that read it, if that was another one."""

    def __str__(self) -> str:
        name = f"sample {self.index} of the {self.set} set"
        return f"{name} ({self.file})" if self.file and self.file not in self.reason else name

    def raised(self) -> Exception:
        """Return the error that stops the run: what the dataset raised, with the sample's name."""
        if isinstance(self.error, TrainingFailed):
            return TrainingFailed(f"{self.reason} ({self}); to skip such samples: --data.on_error skip")
        self.error.sample = str(self)  # type: ignore[attr-defined]
        if self.trace:
            self.error.trace = self.trace  # type: ignore[attr-defined]
            self.error.__cause__ = _OfAnotherProcess(self.trace)
        return self.error

    def portable(self) -> BadSample:
        """Return this sample with an error that can be pickled."""
        self.trace = "".join(traceback.format_exception(self.error))
        try:
            pickle.loads(pickle.dumps(self.error))
        except Exception:  # with a constructor of its own, for example
            self.error = RuntimeError(one_line(f"{type(self.error).__name__}: {self.error}"))
        return self


class _OfAnotherProcess(Exception):
    """Shows the traceback of the process in which an exception was raised."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def passes(error: BaseException) -> bool:
    """Whether reading the same sample again may succeed: memory, a disk, a network, too many open files."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError, ConnectionError, TimeoutError)):
        return True
    return isinstance(error, OSError) and error.errno not in _OF_THE_FILE


def is_indexed_at_once(dataset: Any, collate: Callable[[list[Any]], Any] | None) -> bool:
    """Whether a batch is one indexing of tensors."""
    return collate is None and bool(_in_memory(dataset)[0])


def gatherer(
    dataset: Any, collate: Callable[[list[Any]], Any] | None, *, skip: bool,
    made_by: Callable[..., Any] | None = None, name: str = TRAINING,
    keep: Callable[[Tensor], Tensor] | None = None, sets_epoch: bool = True,
) -> Callable[[MicroBatch], tuple[Any, Sequence[BadSample]]]:  # fmt: skip
    """Return the function that turns a micro batch's indices into a batch and its samples that cannot be read.

    With `skip` the batch is made of the other samples, and is None if there are none. Without `skip` it is None if
    there is a bad sample, and only the first bad one is named, which may be one that does not fit into a batch with the
    others. Errors that may pass (see `passes`) are raised, as is whatever else `collate` raises. Generators in the file
    of `made_by` are seeded too. `name` is that of the dataset in messages. `keep` gives the tensors in memory where
    they are to be kept. `sets_epoch` says whether `set_epoch` of the dataset is called.
    """
    tensors, rows = _in_memory(dataset) if collate is None else ((), None)

    def gather_tensors(micro: MicroBatch) -> tuple[Any, Sequence[BadSample]]:
        indices, kept, at = torch.from_numpy(micro.indices), tensors, rows
        if keep is not None:
            kept, at = tuple(map(keep, tensors)), keep(rows) if rows is not None else None
            if kept[0].is_cuda:  # from memory that is not pinned a copy waits for the step before
                indices = indices.pin_memory()
            indices = indices.to(kept[0].device, non_blocking=True)
        if at is not None:
            indices = at[indices]
        return [tensor.index_select(0, indices) for tensor in kept], ()  # half the time of tensor[indices]

    # indexing once is ten times faster than item by item and collation; nothing is drawn, nor seeded
    return gather_tensors if tensors else Items(dataset, collate, skip, made_by, name, sets_epoch).gather


@dataclass
class Items:
    """Makes batches of a dataset's items."""

    dataset: Any
    collate: Callable[[list[Any]], Any] | None
    skip: bool
    made_by: Callable[..., Any] | None
    name: str
    sets_epoch: bool = True
    own: list[Seed] | None = None
    """The task's generators, found in the process that fetches."""
    epoch: int | None = None
    """The epoch that the dataset knows."""

    def gather(self, micro: MicroBatch) -> tuple[Any, Sequence[BadSample]]:
        if self.own is not None:
            return self._batch(micro)
        self.own = owned(self.dataset, self.collate, self.made_by)
        made = self._batch(micro)
        after = owned(self.dataset, self.collate, self.made_by)
        if len(after) > len(self.own):  # one was made in the first sample: what that drew, nothing has seeded
            self.own = after
            made = self._batch(micro)
        return made

    def _seed(self, micro: MicroBatch) -> None:
        seed_host(micro.seed)
        seed_owned(self.own or (), micro.seed)

    def _set_epoch(self, epoch: int) -> None:
        """Tell the dataset the epoch. What it draws follows from the epoch alone, because an evaluation set may share
        it."""
        for dataset in _with_epochs(self.dataset):
            seed = seed_of(epoch, "set_epoch")
            seed_host(seed)
            seed_owned(owned(dataset), seed)
            dataset.set_epoch(epoch)
        self.epoch = epoch

    def items(self, micro: MicroBatch) -> tuple[list[Any], list[BadSample]]:
        """Return the samples of a micro batch, drawn with its seed, and those that cannot be read."""
        set_progress(micro.step, micro.epoch)
        if micro.epoch != self.epoch and self.sets_epoch:
            self._set_epoch(micro.epoch)
        self._seed(micro)
        many = getattr(self.dataset, "__getitems__", None)
        return self._one_by_one(micro) if many is None else self._at_once(many, micro)

    def _batch(self, micro: MicroBatch) -> tuple[Any, Sequence[BadSample]]:
        items, bad = self.items(micro)
        if bad and not (self.skip and items):
            return None, bad
        join = self.collate or default_collate
        try:
            return join(items), bad
        except Exception as error:
            if passes(error) or self.skip or not isinstance(items, (list, tuple)):
                raise
            found = shape_error(join, items)
            if found is None:
                raise
            position, problem = found
            return None, [_bad(self.dataset, int(micro.indices[position]), self.name, problem)]

    def _at_once(self, many: Callable[[list[int]], Any], micro: MicroBatch) -> tuple[Any, list[BadSample]]:
        indices = micro.indices.tolist()
        try:
            items = many(indices)
            if isinstance(items, (list, tuple)) and len(items) != len(indices):  # the others would weigh wrongly
                raise ValueError(
                    f"__getitems__ of {type(self.dataset).__name__} gives {len(items)} items for {len(indices)} "
                    "indices; it must give one for each, in their order"
                )
            return items, []
        except (Exception, SystemExit) as error:
            if passes(error):
                raise
            self._seed(micro)
            items, bad = self._one_by_one(micro)
            if not bad:  # no sample's own fault
                raise
            return items, bad

    def _one_by_one(self, micro: MicroBatch) -> tuple[list[Any], list[BadSample]]:
        items: list[Any] = []
        bad: list[BadSample] = []
        for index in micro.indices.tolist():
            try:
                items.append(self.dataset[index])
            except (Exception, SystemExit) as error:
                if passes(error):
                    raise
                bad.append(_bad(self.dataset, index, self.name, error))
                if not self.skip:
                    break
        return items, bad


def _with_epochs(dataset: Any, depth: int = 8) -> list[Any]:
    """Return the dataset if it has `set_epoch`, else those with it that it wraps, as Subset and ConcatDataset do."""
    if callable(getattr(dataset, "set_epoch", None)):
        return [dataset]
    parts = getattr(dataset, "datasets", None)
    inner = [getattr(dataset, "dataset", None), *(parts if isinstance(parts, (list, tuple)) else ())]
    found = [each for one in inner if one is not None and depth for each in _with_epochs(one, depth - 1)]
    return list({id(one): one for one in found}.values())


def shape_error(join: Callable[[list[Any]], Any], items: Sequence[Any]) -> tuple[int, Exception] | None:
    """Return which of these items cannot become a batch with the others, and why; None if no single item is the
    cause."""

    def problem(*some: Any) -> Exception | None:
        try:
            join(list(some))
        except Exception as error:
            return error
        return None

    def paired(item: Any) -> Exception | None:
        error = problem(items[0], item)
        is_unclear = "not resizable" in str(error)  # torch's, in a worker, where the first one is larger
        return (problem(item, items[0]) if is_unclear else None) or error

    words, errors = "cannot be put into a batch", [problem(item) for item in items]
    is_alone = any(errors)
    if is_alone and all(errors) and len(items) > 1:
        return None
    if not is_alone:
        words, errors = "cannot be put into one batch with the others", [paired(item) for item in items]
    positions = [position for position, error in enumerate(errors) if error is not None]
    if not positions:
        return None
    error = next(error for error in errors if error is not None)
    made = ValueError(f"{words}: {type(error).__name__}: {error}").with_traceback(error.__traceback__)
    made.__cause__ = error
    nothing_goes_with_the_first = not is_alone and len(positions) == len(items) - 1 > 1
    return (0 if nothing_goes_with_the_first else positions[0]), made


def _in_memory(dataset: Any) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Return the tensors whose rows are a dataset's items, and the row of each item if the dataset is a part of them.

    Only for torch's TensorDataset and a Subset of one (as random_split makes), because a derived class may have other
    items. Else returns no tensors.
    """
    rows: Tensor | None = None
    while type(dataset) is Subset:
        found = np.asarray(dataset.indices)
        if found.dtype.kind not in "iu" or found.ndim != 1 or not len(found):
            return (), None
        if found.min() < 0 or found.max() >= len(dataset.dataset):  # type: ignore[arg-type]  # by itself each is named
            return (), None
        inner = torch.from_numpy(found.astype(np.int64))
        rows = inner if rows is None else inner[rows]
        dataset = dataset.dataset
    return (dataset.tensors, rows) if type(dataset) is TensorDataset else ((), None)


def fetcher(
    dataset: Any, collate: Callable[[list[Any]], Any] | None, name: str = TRAINING
) -> Callable[[MicroBatch], Any]:
    """Return the function that turns a micro batch's indices into a batch. A sample that cannot be read raises."""
    gather = gatherer(dataset, collate, skip=False, name=name)

    def fetch(micro: MicroBatch) -> Any:
        batch, bad = gather(micro)
        if bad:
            raise bad[0].raised()
        return batch

    return fetch


def _bad(dataset: Any, index: int, name: str, error: Exception | SystemExit) -> BadSample:
    known = isinstance(error, TrainingFailed)
    reason = one_line(error if known else f"{type(error).__name__}: {error}")[: 2 * _REASON if known else _REASON]
    try:
        file = file_of(dataset, index)
    except Exception:  # a dataset that only looks like one of torch's
        file = ""
    if isinstance(error, (StopIteration, SystemExit)):  # raised on, they would end a generator or a data worker
        error = RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)
    return BadSample(index, name, file, reason, error)


def file_of(dataset: Any, index: int) -> str:
    """Return the file of a sample; '' if the dataset does not have it.

    Looks through torch's Subset and ConcatDataset; asks shards; and looks for a list of paths as long as the dataset:
    `samples` of an ImageFolder, or whatever it is called.
    """
    while True:
        if hasattr(dataset, "indices") and hasattr(dataset, "dataset"):
            dataset, index = dataset.dataset, int(dataset.indices[index])
        elif hasattr(dataset, "datasets") and hasattr(dataset, "cumulative_sizes"):
            part = bisect.bisect_right(dataset.cumulative_sizes, index)
            index -= dataset.cumulative_sizes[part - 1] if part else 0
            dataset = dataset.datasets[part]
        else:
            break
    if isinstance(dataset, Shards):
        return dataset.file_of(index)
    for value in [dataset, *getattr(dataset, "__dict__", {}).values()]:
        if isinstance(value, (list, tuple)) and len(value) == len(dataset):
            item = value[index][0] if isinstance(value[index], (list, tuple)) and value[index] else value[index]
            if isinstance(item, Path) or (isinstance(item, str) and os.path.lexists(item)):
                return str(item)
    return ""

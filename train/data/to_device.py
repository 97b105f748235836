"""Batches on their way to the device: tensors are pinned, copied and converted, however a task nests them.

We do not use DataLoader's thread for pinning: it starts together with the workers, before this process has chosen its
device, and would open the first GPU on every rank.
"""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from .seeding import Seed, seed_compute

T = TypeVar("T")
OnDevice = Callable[[Any], Any]
"""A task's `on_device`: turns a fetched batch, which is on the device, into what loss and metrics get."""
AHEAD = 3
"""Maximum number of pinned batches that are not taken yet."""


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return the value with everything in its lists, tuples, dicts and named tuples changed; these keep their types."""
    if isinstance(value, torch.Tensor):  # most batches are few of them
        return change(value)
    if isinstance(value, MutableMapping):
        made = copy.copy(value)  # a defaultdict cannot be made of items alone
        for key, inner in value.items():  # not update(), which adds to the counts of a Counter
            made[key] = mapped(inner, change)
        return made
    if isinstance(value, PackedSequence):  # a named tuple whose sizes stay on the host
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(inner, change) for inner in value))
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(inner, change) for inner in value)
    return change(value)


def prepared(
    batch: Any,
    seed: int,
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    channels_last: bool,
    on_device: OnDevice | None,
    own: Sequence[Seed] = (),
) -> Any:
    """Prepare a fetched batch for loss and metrics; see Loader.

    Args:
        seed: of the micro batch.
        own: generators that `on_device` can reach, see seeding.py.
    """
    if on_device is not None and batch is not None:
        batch = to_device(batch, device)
        seed_compute(seed, device, tag="on device", own=own)
        batch = on_device(batch)
    return to_device(batch, device, dtype=dtype, channels_last=channels_last)


def to_device(
    batch: Any,
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    channels_last: bool = False,
) -> Any:
    """Move every tensor of a batch (in lists, tuples, dicts, named tuples) to the device."""

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            kind = dtype if dtype is not None and value.is_floating_point() else value.dtype
            if value.device == device and value.dtype == kind and not (channels_last and value.dim() == 4):
                return value
            layout = torch.channels_last if channels_last and value.dim() == 4 else torch.preserve_format
            # a copy to the host must be there when it is looked at
            return value.to(device, kind, non_blocking=device.type == "cuda", memory_format=layout)
        if isinstance(value, PackedSequence):
            packed = value.to(device, non_blocking=device.type == "cuda")
            return packed.to(dtype) if dtype is not None and packed.data.is_floating_point() else packed
        if hasattr(value, "to") and not isinstance(value, np.ndarray):
            return value.to(device)
        return value

    return mapped(batch, move)


def pinned(items: Iterator[Any], device: torch.device, has_workers: bool) -> Iterator[Any]:
    """Yield the same items with their tensors in pinned memory. Without a GPU nothing changes.

    Args:
        has_workers: others make the items, so that a thread here may wait for them. Without, they are made and pinned
            by who takes them: making draws from this process's random generators, as training does.
    """
    if device.type != "cuda":
        return items

    def pin(item: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        micro, batch, bad = item
        return micro, mapped(batch, _pin), bad

    if not has_workers:
        return map(pin, items)
    return ahead(items, pin, lambda: torch.cuda.set_device(device))


def _pin(value: Any) -> Any:
    """Return a value in pinned memory. What a dataset has put on a GPU stays there."""
    return value.pin_memory() if hasattr(value, "pin_memory") and not getattr(value, "is_cuda", False) else value


def ahead(items: Iterator[Any], make: Callable[[Any], T], begin: Callable[[], None] = lambda: None) -> Iterator[T]:
    """Yield `make(item)` for the items in order. A thread makes them, `AHEAD` of them before they are asked for.

    What the items or `make` raise is raised here, at its place in the order.

    Args:
        begin: called first in the thread.
    """
    ready: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    wanted, is_over = threading.Semaphore(AHEAD - 1), threading.Event()

    def work() -> None:
        try:
            begin()
            for item in items:
                ready.put(("item", make(item)))
                wanted.acquire()
                if is_over.is_set():
                    return
            ready.put(("end", None))
        except BaseException as error:
            ready.put(("error", error))

    # daemon: it may wait for a worker that hangs, and is not joined
    threading.Thread(target=work, daemon=True, name="pin").start()
    try:
        while True:
            kind, value = ready.get()
            if kind == "end":
                return
            if kind == "error":
                raise value
            wanted.release()
            yield value
    finally:
        is_over.set()
        wanted.release()

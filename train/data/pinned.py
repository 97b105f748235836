"""Batches into pinned memory, from which a GPU copies by itself while the host goes on.

DataLoader's own thread for it is of no use here: DataLoader starts it together with the workers, on the device that is
current then. Workers are forked before this process touches any device, which is also before it has chosen one: the
thread would open the first GPU, on every rank.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from train.data.nested import mapped

T = TypeVar("T")
_AHEAD = 2
"""Batches that are pinned and not yet taken: one is being copied while another waits."""
_LOOK_EVERY = 0.2
"""Seconds between two looks at whether anybody still wants what is made ahead."""


def pinned(items: Iterator[Any], device: torch.device, has_workers: bool) -> Iterator[Any]:
    """The same items with their tensors in pinned memory; nothing changes where the device is no GPU.

    Args:
        has_workers: others make the items, so that a thread here may wait for them. Without, they are made and pinned
            by who takes them: making draws from this process's random generators, as training does.
    """
    if device.type != "cuda":
        return items

    def pin(item: Any) -> Any:
        return mapped(item, _pin)

    if not has_workers:
        return map(pin, items)
    return ahead(items, pin, lambda: torch.cuda.set_device(device))


def _pin(value: Any) -> Any:
    # torch's would make lists of all tuples that it finds, and of other sequences: a batch would be another on a GPU
    is_of_torch = isinstance(value, (torch.Tensor, Mapping)) or hasattr(value, "pin_memory")
    return pin_memory(value) if is_of_torch else value


def ahead(items: Iterator[Any], make: Callable[[Any], T], begin: Callable[[], None] = lambda: None) -> Iterator[T]:
    """What `make` makes of the items, in their order, made by a thread, `_AHEAD` of them before they are asked for.

    What the items or `make` raise is raised here, at its place in the order.

    Args:
        begin: called first in the thread.
    """
    ready: queue.Queue[tuple[str, Any]] = queue.Queue(_AHEAD)
    is_over = threading.Event()

    def put(kind: str, value: Any) -> None:
        while not is_over.is_set():
            try:
                ready.put((kind, value), timeout=_LOOK_EVERY)
                return
            except queue.Full:
                pass

    def work() -> None:
        try:
            begin()
            for item in items:
                put("item", make(item))
                if is_over.is_set():
                    return
            put("end", None)
        except BaseException as error:
            put("error", error)

    # daemon: it may wait for a worker that hangs, and nobody waits for it
    threading.Thread(target=work, daemon=True, name="pin").start()
    try:
        while True:
            kind, value = ready.get()
            if kind == "end":
                return
            if kind == "error":
                raise value
            yield value
    finally:
        is_over.set()

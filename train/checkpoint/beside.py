"""A state on its way from a GPU to memory that no rank owns, while the host goes on.

The copies are work of the device, in the order of all that it was asked for: after the update of the step, and before
whatever the next one does to weights or buffers. So they are of one step, and no host waits. The memory is locked for
the device (pinned.py), which writes it by itself. What that takes from training is told by the device's own events;
a thread waits for them, then reads the losses, which are there by now, and seals the buffer.

On a CPU the same code copies at once.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from train.checkpoint.packed import Packed, as_it_lies
from train.checkpoint.pinned import lay_open, pin, unpin
from train.checkpoint.room import longest
from train.checkpoint.shared import Draft, Slots, begin_of_tensors
from train.record.metrics import Training

log = logging.getLogger("train")

SHARE = 0.01
"""Of the time, that may go into snapshots."""
Lines = Callable[[], list[Training] | None]
"""Lines that may not be written yet, from any thread, once the device has done what it was asked for before; None where
their losses are not finite."""


_BUSY = 0.25
"""Of the time, at most, that a core is to work for a copy: its checksum takes longer than the copy itself."""
_PATIENCE = 10.0
"""Seconds that the end waits for a copy that is under way: a device may hang."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of madvise(2), since Linux 5.14."""


class Beside:
    """One rank's copies. One thread asks for them; one copy is under way at a time."""

    def __init__(self, slots: Slots, device: torch.device) -> None:
        self._slots, self._device = slots, device
        self._thread: threading.Thread | None = None
        self._memory: list[Tensor] = []
        self._pinned: list[int] = []
        """Addresses of what is locked."""
        self._is_locking = False
        self._at = 0.0
        self.taken = 0.0
        """Seconds that the last copy took from training, of the host and of the device."""
        self.cost = 0.0
        """The same, or more: of what it is the hundredth, the next copy follows."""
        self.problem = ""
        """Why there can be no copies, in a line; '' while there can."""

    @property
    def is_busy(self) -> bool:
        """Whether something is under way."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_due(self) -> bool:
        """Whether so much time has passed since the last copy that the next may follow."""
        return not self.is_busy and time.monotonic() >= self._at + self.cost / SHARE

    def holds(self, size: int) -> bool:
        """Whether memory for so many bytes is locked, and nothing is under way. Where it can be locked, that begins."""
        if self.is_busy:
            return False
        if self._memory and min(map(len, self._memory)) >= size:
            return True
        if self._slots.holds(size) and not self.problem:
            self._is_locking = True
            try:
                self._begin(self._lock)
            except RuntimeError as error:  # no more threads
                self._is_locking, self.problem = False, f"no snapshots in memory: {error}"
        return False

    def wait(self) -> None:
        """Wait until no copy is under way."""
        if self._thread is not None and not self._is_locking:
            self._thread.join()

    def close(self) -> None:
        """Give the memory back."""
        if self._thread is not None:
            self._thread.join(_PATIENCE)
        if not self.is_busy:
            self._unlock()

    def copy(self, step: int, state: Packed, lines: Lines) -> bool:
        """Begin to copy the state after a step. Whether it has begun: where memory has to be locked first, that has.

        Raises:
            RuntimeError: there are no more threads, or the device failed.
        """
        began = time.perf_counter()
        length = longest(state)
        start = begin_of_tensors(length)
        if not self.holds(start + state.end):
            return False
        assert not self.is_busy
        draft = self._slots.open(step)
        if draft is None:
            return False
        try:
            begun = self._moment()
            self._put(state, self._memory[draft.slot][start:])
            ended, self._at = self._moment(), time.monotonic()
            asked = time.perf_counter() - began
            self._begin(self._finish, draft, state, length, lines, (begun, ended), asked)
        except BaseException:
            draft.close()
            raise
        return True

    def _begin(self, what: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=what, args=arguments, daemon=True, name="snapshot")
        thread.start()
        self._thread = thread

    def _moment(self) -> torch.cuda.Event | None:
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _put(self, state: Packed, memory: Tensor) -> None:
        for tensor, at in zip(state.tensors, state.starts, strict=True):
            if tensor.numel():
                flat = as_it_lies(tensor)
                memory[at : at + len(flat)].copy_(flat, non_blocking=True)

    def _lock(self) -> None:
        """Take hold of all the memory there is."""
        try:
            self._unlock()
            maps = self._slots.memory()
            for one in maps:
                with contextlib.suppress(OSError):  # an older kernel; else this process finds its pages in CUDA's call
                    one.madvise(_POPULATE_WRITE)
            memory = [lay_open(one) for one in maps]
            for flat in memory if self._device.type == "cuda" else ():
                code = pin(flat, self._device)
                if not code:
                    self._pinned.append(flat.data_ptr())
                else:
                    log.warning(
                        "warning: %.0f MB of memory cannot be pinned (CUDA error %d): snapshots hold training up",
                        len(flat) / 1e6, code,
                    )  # fmt: skip
            self._memory = memory
        except (OSError, ValueError, RuntimeError) as error:
            self.problem = f"no snapshots in memory: {error}"
        finally:
            self._is_locking = False

    def _unlock(self) -> None:
        """Before the memory is gone: another one may come to lie where it was."""
        while self._pinned:
            unpin(self._pinned.pop(), self._device)
        self._memory = []

    def _finish(
        self, draft: Draft, state: Packed, length: int, lines: Lines, moments: tuple[Any, Any], asked: float
    ) -> None:
        """When all is there: seal it, if the losses up to its step are in order."""
        try:
            taken, (begun, ended) = asked, moments
            if ended is not None:
                torch.cuda.set_device(self._device)  # else this thread would open the first one
                ended.synchronize()
                taken += begun.elapsed_time(ended) / 1000
            told = lines()
            sealing = time.perf_counter()
            if told is not None and len(plain := state.plain(told)) <= length:
                # filled up: where the tensors begin follows from its length
                memory = self._memory[draft.slot].numpy().data
                draft.seal(plain.ljust(length, b"\0"), memory, state.end)
            busy = time.perf_counter() - sealing
            self.taken, self.cost = taken, max(taken, busy * SHARE / _BUSY)
        except Exception as error:
            self.problem = f"no more snapshots in memory: {error}"
        finally:
            draft.close()

"""A state on its way from a GPU to memory that no rank owns, while the host goes on.

The copies are work of the device, in the order of all that it was asked for: after the update of the step, and before
whatever the next one does to weights or buffers. So they are of one step, and no host waits. The memory is locked for
the device (pinned.py), which writes it by itself. What that takes from training is told by the device's own events;
a thread waits for them, then reads the losses, which are there by now, and seals the buffer.

On a CPU the same code copies at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from train.checkpoint.packed import Packed, as_it_lies
from train.checkpoint.pinned import lay_open, pin, unpin
from train.checkpoint.room import SLACK
from train.checkpoint.shared import Draft, Slots, begin_of_tensors
from train.record.metrics import Training

log = logging.getLogger("train")

Lines = Callable[[], list[Training] | None]
"""Lines that may not be written yet, from any thread, once the device has done what it was asked for before; None where
their losses are not finite."""


class Beside:
    """One rank's copies. One thread asks for them; one copy is under way at a time."""

    def __init__(self, slots: Slots, device: torch.device) -> None:
        self._slots, self._device = slots, device
        self._thread: threading.Thread | None = None
        self._memory: list[Tensor] = []
        self._pinned: list[int] = []
        """Addresses of what is locked."""
        self._at = 0.0
        self.cost = 0.0
        """Seconds that the last copy took from training."""
        self.problem = ""
        """Why there can be no copies, in a line; '' while there can."""

    @property
    def is_busy(self) -> bool:
        """Whether something is under way."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def age(self) -> float:
        """Seconds since the last copy was asked for."""
        return time.monotonic() - self._at

    def wait(self) -> None:
        """Wait until nothing is under way."""
        if self._thread is not None:
            self._thread.join()

    def copy(self, step: int, state: Packed, lines: Lines) -> bool:
        """Begin to copy the state after a step. Whether it has begun: where memory has to be locked first, that has.

        Raises:
            RuntimeError: there are no more threads, or the device failed.
        """
        assert not self.is_busy
        began = time.perf_counter()
        length = len(state.plain([])) + SLACK
        start = begin_of_tensors(length)
        needed = start + state.end
        if not self._slots.holds(needed):
            return False
        if not self._memory or min(map(len, self._memory)) < needed:
            self._begin(self._lock)
            return False
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
        self._thread = threading.Thread(target=what, args=arguments, daemon=True, name="snapshot")
        self._thread.start()

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
        """Take hold of all the memory there is. Touched already, for it was reserved: locking it costs little."""
        try:
            for address in self._pinned:
                unpin(address)
            self._pinned, memory = [], [lay_open(one) for one in self._slots.memory()]
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
            self.cost = taken
            told = lines()
            if told is not None and len(plain := state.plain(told)) <= length:
                # filled up: where the tensors begin follows from its length
                memory = self._memory[draft.slot].numpy().data
                draft.seal(plain.ljust(length, b"\0"), memory, state.end)
        except Exception as error:
            self.problem = f"no more snapshots in memory: {error}"
        finally:
            draft.close()

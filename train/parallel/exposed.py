"""How long a rank waits for communication with nothing to compute beside it.

Most of a reduction travels while the backward pass goes on; only the rest of it costs time. That is what is measured:
on a CPU by the clock of the host, on a GPU between two events of its stream, which nobody waits for. Waiting for a
slower rank is part of it; it cannot be told apart from the network.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

_FIRST = _EVERY = 16
"""So many steps are measured from the first on, for there a rank waits for another's start; then every sixteenth, for
measuring one costs some 10 us."""
_NOTHING = contextlib.nullcontext()


class Exposed:
    """The seconds of one rank since it began, over all steps: what was measured stands for the steps between."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._steps = self._weight = self._covered = 0
        self._seconds = 0.0
        self._pending: collections.deque[tuple[int, Any, Any]] = collections.deque()

    def begin(self) -> None:
        """The next step begins."""
        self._steps += 1
        is_on = self._steps <= _FIRST or self._steps % _EVERY == 0
        self._weight = self._steps - self._covered if is_on else 0
        if is_on:
            self._covered = self._steps

    @property
    def is_on(self) -> bool:
        """Whether this step is measured."""
        return self._weight > 0

    def mark(self) -> Any:
        """This moment: on a GPU that at which it comes to what is asked of it from now on."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, begun: Any, ended: Any) -> None:
        """Count what lies between two marks of this step."""
        if self._is_cuda:
            self._pending.append((self._weight, begun, ended))
            self._take()  # not all ranks ask how long it took
        else:
            self._seconds += self._weight * (ended - begun)

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """To be entered around a collective that nothing is computed beside."""
        return self._timed() if self._weight else _NOTHING

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        begun = self.mark()
        yield
        self.add(begun, self.mark())

    def seconds(self) -> float:
        """Up to now; of a GPU as far as it has come, for this waits for nothing."""
        self._take()
        return self._seconds * self._steps / max(self._covered, 1)

    def _take(self) -> None:
        """Count what a GPU has come past."""
        while self._pending and self._pending[0][2].query():
            weight, begun, ended = self._pending.popleft()
            self._seconds += weight * begun.elapsed_time(ended) / 1e3

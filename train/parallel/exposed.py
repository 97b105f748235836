"""How long a rank waits for communication with nothing to compute beside it.

Most of a reduction travels while the backward pass goes on; only the rest of it costs time. That is what is measured:
on a CPU by the clock of the host, on a GPU between two events of its stream, which nobody waits for. Waiting for a
slower rank is part of it; it cannot be told apart from the network.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from train.parallel.moments import Moments

_FIRST = _EVERY = 16
"""So many steps are measured from the first on, for there a rank waits for another's start; then every sixteenth, for
measuring one costs some 10 us."""
_NOTHING = contextlib.nullcontext()


class Exposed:
    """The seconds of one rank since it began, over all steps: what was measured stands for the steps between."""

    def __init__(self, device: torch.device) -> None:
        self._moments = Moments(device)
        self._steps = self._weight = self._covered = 0

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
        return self._moments.mark()

    def add(self, begun: Any, ended: Any) -> None:
        """Count what lies between two marks of this step."""
        self._moments.add(begun, ended, self._weight)

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
        return self._moments.seconds() * self._steps / max(self._covered, 1)

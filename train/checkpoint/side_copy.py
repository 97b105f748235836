"""A copy of the state that a GPU makes on a separate stream, while it computes the next step.

What a forward may change (buffers, the task's objects) is copied at once, on the stream of the computation. Weights,
their averages and the optimizer's state stay as they are until the next update. They are copied beside the forward and
the backward, and the update waits on the GPU until the copy has ended. The host never waits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .serialize import Serialized

_OVERLAPPED = 0.2
"""Share of an overlapped copy's time that counts as taken from training. Such a copy uses one or two hundredths of a
GPU's memory bandwidth, so at a limit of 1 % it takes at most 0.1 % of the time."""


class SideCopy:
    """One copy. Its references keep the tensors until the copy has ended, even if training replaces them."""

    def __init__(self, state: Serialized, memory: Tensor, device: torch.device, stream: torch.cuda.Stream) -> None:
        """Start the copy, after everything that the GPU has been asked to compute.

        Args:
            memory: the pinned buffer, as bytes.
            stream: the stream of the copies.
        """
        self.state, self._device = state, device
        computing = torch.cuda.current_stream(device)
        self._begun = _event(computing)
        state.copy_to(memory, rests_until_update=False)
        self._at_rest = _event(computing)
        stream.wait_event(self._at_rest)
        with torch.cuda.stream(stream):
            state.copy_to(memory, rests_until_update=True)
        self._ended = _event(stream)
        self._held: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        """Events before and after the GPU's wait for the copy."""

    def hold(self) -> None:
        """Let all that the GPU is asked to compute from now on wait for the copy."""
        computing = torch.cuda.current_stream(self._device)
        asked = _event(computing)
        computing.wait_event(self._ended)
        self._held = asked, _event(computing)

    def wait(self) -> float:
        """Wait for the copy. Returns the seconds that it took from training."""
        torch.cuda.set_device(self._device)  # else a thread would open the first one
        self._ended.synchronize()
        taken = self._begun.elapsed_time(self._at_rest) + _OVERLAPPED * self._at_rest.elapsed_time(self._ended)
        if self._held is not None:
            self._held[1].synchronize()
            taken += self._held[0].elapsed_time(self._held[1])
        return taken / 1000


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record(stream)
    return event

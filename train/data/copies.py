"""Large tensors of a batch on their way to a GPU while it computes the step before.

A copy is work of the device. Among what it is asked to compute, as small ones are, it waits for the step before and
holds up the next one: pictures for a ResNet-50 take a hundredth of the time, more where they are floating point
numbers. On a stream of its own it begins at once, and what computes waits for its end alone. The host waits for
neither.

Memory of another stream is not used again in the order of computing, but when the host sees that it has been
computed with: so one batch is copied ahead, and no more. Where the host runs further ahead, as with several micro
batches a step, the others are copied among what is computed, in whose order one piece of memory serves all of them.
"""

from __future__ import annotations

import collections

import torch
from torch import Tensor

LEAST = 1 << 20
"""Bytes of a tensor that is copied so: the device needs less for a smaller one than the host for this (some 20 us)."""


class Copies:
    """The copies of one process to its GPU. For one thread:

    begin()      the next batch is there; all that computes with those before it has been asked for
    takes(), copy()    for each of its tensors
    """

    def __init__(self, device: torch.device) -> None:
        """Opens no device, for loader processes may be yet to be forked."""
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._computing: collections.deque[torch.cuda.Event] = collections.deque()
        """The ends of what is computed with batches that were copied ahead."""
        self._is_ahead = self._has_copied = False

    def begin(self) -> None:
        if self._has_copied:
            self._computing.append(torch.cuda.current_stream(self._device).record_event())
        while self._computing and self._computing[0].query():
            self._computing.popleft()
        self._is_ahead, self._has_copied = len(self._computing) <= 1, False

    def takes(self, value: Tensor) -> bool:
        """Whether a tensor of this batch is to be copied so; if not, it may be as any other is."""
        is_plain = type(value) is Tensor and value.layout == torch.strided  # of others nobody knows whose memory it is
        return is_plain and self._is_ahead and value.nbytes >= LEAST and value.device.type == "cpu"

    def copy(self, value: Tensor) -> Tensor:
        """The tensor on the GPU, of its own type and layout, for whatever is computed there from now on."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(self._stream):
            copied = value.to(self._device, non_blocking=True)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)
        # or its memory would be a later copy's when the host lets go of it, which may be before it is computed with
        copied.record_stream(computing)
        self._has_copied = True
        return copied

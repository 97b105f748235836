"""What all ranks sum up in every step: the loss, how much it counts, and whether to stop, save or copy the state.

The stats are one tensor on the device, which is made once for the whole run. A step copies nothing to the device,
because a copy would wait for it: a kernel fills in what the host knows, and only when it changes.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..build.loss import BatchValue
from ..parallel.strategy import STEP_STATS as STATS
from ..signals import StopRequest
from .part_stats import PartStats

LOSS, COUNT, STOP, SAVE, COUNTED, COPY = range(len(STATS))
T = TypeVar("T")
"""Type of what the host remembers of a step until its sums are read."""


class StepResult(NamedTuple):
    """The result of a step, on the device: tensors that the host reads later."""

    sums: dict[str, Tensor]
    """Maps the name of each update that was due to its sums over all ranks: those of STATS, then the totals of the
    parts of the loss, then their counts."""
    figures: dict[str, Tensor]
    """Maps names of run/metrics.Training to scalars, for the line of the step."""
    left_out: list[str]
    """Names of the updates that were left out (on_nan)."""


class StepStats:
    """One rank's stats of the step that it computes. With ordered sums, the stats of each micro batch precede them."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, *, is_ordered: bool, leaves_out: bool, stop: StopRequest,
        save: Callable[[], bool] = lambda: False, copy: Callable[[], float] = lambda: 0.0, kept: Tensor | None = None,
        kept_parts: Tensor | None = None, what: str = "loss", parts: Sequence[str] | None = None,
        parts_fixed: Callable[[Sequence[str]], None] = lambda names: None,
    ) -> None:  # fmt: skip
        """
        Args:
            is_ordered: the strategy adds in one order on any number of ranks.
            leaves_out: samples that cannot be read are left out, so a step may count fewer than it was to have.
            stop: says whether this rank was asked to stop.
            save: says whether this rank asks for a checkpoint after the step.
            kept: gets the sums of the last step whose loss is finite, because lines of later steps repeat it;
                `kept_parts` those of its parts.
            what, parts, parts_fixed: see PartStats.
            copy: whether this rank asks for a copy of the state (checkpoint/snapshot.py), called once a step.
        """
        self._dtype, self._device, self._is_ordered, self._stop, self._copy = dtype, device, is_ordered, stop, copy
        self._leaves_out, self._save, self._kept = leaves_out, save, kept
        self._is_host, self._largest = device.type == "cpu", torch.finfo(dtype).max
        self._tensor = torch.zeros(len(STATS), dtype=dtype, device=device)
        self._cells = self._tensor.unbind()
        self._kept_parts = kept_parts
        self.parts = PartStats(dtype, device, is_ordered=is_ordered, what=what, names=parts, fixed=parts_fixed)
        self._filled: list[float | None] = [0.0] * len(STATS)
        """The value that the host has filled into each cell; None if the device has written the cell."""
        self.begin(0)

    def begin(self, micros: int) -> None:
        """Reset the stats for the next step, of this many micro batches over all ranks."""
        self.parts.begin(micros)
        self._result: Tensor | None = None
        self.counts_itself = False
        """Whether a loss of this step came with a count."""
        self._has_loss = False
        self._count: Tensor | float = 0.0
        self._rows: Tensor | None = None
        """With ordered sums, total and count of each micro batch, so that they do not depend on who adds them."""
        if self._is_ordered:
            self._rows = torch.zeros(micros, 2, dtype=self._dtype, device=self._device)

    def add(self, number: int, loss: BatchValue, *, is_repeated: bool = False) -> None:
        """Add the loss of a micro batch. The loss of a repeated one is added by another rank."""
        self.counts_itself |= loss.counts_itself
        self.parts.add(number, loss.parts, is_repeated=is_repeated)
        if is_repeated:
            return
        count = loss.counted()
        if self._rows is not None:
            self._rows[number, 0] = self._total(loss)
            _put(self._rows[number, 1], count)
        else:
            cell = self._cells[LOSS]
            if self._has_loss:
                cell.add_(self._total(loss))
            elif not self._is_host and loss.value.dtype == self._dtype:
                torch.mul(loss.value.detach(), loss.weight, out=cell)  # one kernel instead of two
            else:
                _put(cell, self._total(loss))
            self._filled[LOSS] = None
            # the first of several may be a number and the next a tensor
            self._count = self._count + (count.to(self._dtype) if isinstance(count, Tensor) else count)
        self._has_loss = True

    def _total(self, loss: BatchValue) -> Tensor | float:
        """Return `loss.total`. On the host it is a number: rounded once, to the same bits, in a third of the time (4 us
        less)."""
        if not self._is_host:
            return loss.total(self._dtype)
        total = loss.value.item() * loss.weight
        return math.copysign(math.inf, total) if abs(total) > self._largest else total  # torch refuses to fill it in

    def tensor(self) -> Tensor:
        """Return the stats on the device, to be summed over the ranks. Call it after the last loss of the step is
        added."""
        if self._result is not None:
            return self._result
        if not self._has_loss or self._rows is not None:
            self._set(LOSS, 0.0)
        self._set(COUNT, self._count)
        self._set(STOP, float(self._stop.asked))
        self._set(SAVE, float(self._save()))
        self._set(COUNTED, float(self.counts_itself))
        self._set(COPY, self._copy())
        pieces = [self._tensor] if self._rows is None else [self._rows.reshape(-1), self._tensor]
        if self.parts.names:
            pieces.append(self.parts.tensor())
        self._result = torch.cat(pieces) if len(pieces) > 1 else self._tensor
        return self._result

    def _set(self, place: int, value: Tensor | float) -> None:
        if isinstance(value, Tensor):
            self._filled[place] = None
        elif self._filled[place] == value:
            return
        else:
            self._filled[place] = value
        _put(self._cells[place], value)

    def summed(self, reduced: Tensor) -> Tensor:
        """Return the sums (see `StepResult.sums`), from what the strategy has reduced over the ranks."""
        sums = reduced
        if self._rows is not None:  # each row is one rank's, and zeros of the others round nothing
            rows, stats = reduced[: self._rows.numel()].view_as(self._rows), reduced[self._rows.numel() :]
            pieces = [rows.sum(0), stats[STOP : len(STATS)]]
            if self.parts.names:
                pieces.append(self.parts.summed(stats[len(STATS) :]))
            sums = torch.cat(pieces)
        if self._kept is not None:
            _keep(self._kept, sums[: len(STATS)], sums[LOSS])
        if self._kept_parts is not None and self.parts.names:
            _keep(self._kept_parts[: len(sums) - len(STATS)], sums[len(STATS) :], sums[LOSS])
        return sums

    def scale(self, sums: Tensor, samples: int) -> Tensor | None:
        """Return the factor that turns gradients into means over what all ranks counted; None if they are that already.

        It is computed on the device, so that no host waits for the count.

        Args:
            sums: the sums of STATS.
            samples: what the gradients are means over so far.
        """
        if not (self._leaves_out or self.counts_itself):
            return None
        count = sums[COUNT]
        return (samples / count).masked_fill(count <= 0, 0.0)


def _keep(kept: Tensor, sums: Tensor, loss: Tensor) -> None:
    """Replace what is kept by new sums if the loss is finite. The host does not wait for the answer."""
    kept.copy_(torch.where(loss.isfinite(), sums, kept))


def _put(cell: Tensor, value: Tensor | float) -> None:
    if isinstance(value, Tensor):
        cell.copy_(value)
    else:
        cell.fill_(value)


class Readback(Generic[T]):
    """Brings the result of a step to the host: at once from a CPU, a step later from a GPU, so that it never waits."""

    def __init__(self, device: torch.device) -> None:
        self._lag = 1 if device.type == "cuda" else 0
        self._pending: collections.deque[tuple[T, dict[str, int], list[str], Tensor, Any]] = collections.deque()
        self._free: list[tuple[Tensor, Any]] = []
        """Pinned tensors and events for reuse: making them costs more than the copy."""

    def put(self, step: T, result: StepResult) -> None:
        """Start to copy the result of a step to the host. `step` is what `take` returns with it."""
        parts = [*result.sums.values(), *(figure.double().reshape(1) for figure in result.figures.values())]
        values, event = parts[0] if len(parts) == 1 else torch.cat(parts), None
        if self._lag:
            pinned, event = self._pinned(values)
            pinned.copy_(values, non_blocking=True)
            event.record()
            values = pinned
        lengths = {update: len(sums) for update, sums in result.sums.items()}
        self._pending.append((step, lengths, [*result.figures], values, event))

    def _pinned(self, values: Tensor) -> tuple[Tensor, Any]:
        """Return a pinned tensor for values, and an event."""
        if self._free:
            pinned, event = self._free.pop()
            if pinned.shape == values.shape and pinned.dtype == values.dtype:  # some steps have figures, others none
                return pinned, event
        return torch.empty(values.shape, dtype=values.dtype, pin_memory=True), torch.cuda.Event()

    def take(self, everything: bool) -> Iterator[tuple[T, dict[str, list[float]], dict[str, float]]]:
        """Yield each step whose result can be read by now: what `put` got, the sums of each update, and the figures.

        Args:
            everything: also wait for the result of the last step.
        """
        while len(self._pending) > (0 if everything else self._lag):
            step, lengths, figures, values, event = self._pending.popleft()
            if event is not None:
                event.synchronize()
            numbers, end = values.tolist(), 0
            if event is not None:
                self._free.append((values, event))
            sums: dict[str, list[float]] = {}
            for update, length in lengths.items():
                sums[update] = numbers[end : end + length]
                end += length
            yield step, sums, dict(zip(figures, numbers[end:], strict=True))

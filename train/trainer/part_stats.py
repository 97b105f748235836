"""What ranks sum up of the parts of a loss: of each part its total and its count, in the row of the step's stats.

The first step that has a loss fixes the names, on all ranks: one of them may have no sample in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..build.loss import BatchValue, check_parts
from ..parallel.overlap import DeviceTimer
from ..parallel.world import World

Parts = Mapping[str, BatchValue]


class PartStats:
    """One rank's sums of the parts of a loss in the step that it computes; of each micro batch if sums are ordered."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, *, is_ordered: bool, what: str,
        names: Sequence[str] | None, fixed: Callable[[Sequence[str]], None],
    ) -> None:  # fmt: skip
        """
        Args:
            what: names the loss and its file, for messages.
            names: the names of the parts that an earlier attempt has fixed; None: none has.
            fixed: called on each rank with the names once they are fixed.
        """
        self.names = names
        """Names of the parts; None: no step has fixed them yet."""
        self._dtype, self._device, self._is_ordered, self._what, self._fixed = dtype, device, is_ordered, what, fixed
        self._row: Tensor | None = None
        self._filled: list[float | None] = []
        """The value that the host has filled into each cell of the row; None if the device has written the cell."""
        self.begin(0)

    def begin(self, micros: int) -> None:
        """Reset the sums for the next step, of this many micro batches over all ranks."""
        self._micros = micros
        self._seen: tuple[str, ...] | None = None
        self._early: list[tuple[int, Parts]] = []
        """Parts that came before the names were fixed."""
        self._sums: dict[int, list[Tensor | float]] = {}
        """Maps a micro batch (0 for all of them, unless sums are ordered) to totals, then counts."""

    def add(self, number: int, parts: Parts, *, is_repeated: bool) -> None:
        """Add the parts of a micro batch. Those of a repeated one only tell the names.

        Raises:
            TrainingFailed: the names are others than before.
        """
        known = self._seen if self.names is None else self.names
        if known is None:
            self._seen = (*parts,)
        elif known or parts:
            check_parts(known, parts, self._what)
        if is_repeated or not parts:
            return
        if self.names is None:
            self._early.append((number, parts))
        else:
            self._add(number, parts)

    def fix(self, world: World, communication: DeviceTimer) -> None:
        """Fix the names by the losses of this step, if no step has. Then it is a collective.

        Args:
            communication: counts the wait for the other ranks.
        """
        if self.names is not None:
            return
        with communication.waiting():
            found = [names for names in world.gather(self._seen) if names is not None]
        for names in found:
            check_parts(found[0], names, self._what)
        if found:
            self.names = found[0]
            self._fixed(self.names)
            for number, parts in self._early:
                self._add(number, parts)

    def _add(self, number: int, parts: Parts) -> None:
        assert self.names is not None
        ordered = [parts[name] for name in self.names]
        values = [self._total(part) for part in ordered] + [self._number(part.counted()) for part in ordered]
        key = number if self._is_ordered else 0
        before = self._sums.get(key)
        self._sums[key] = values if before is None else [a + b for a, b in zip(before, values, strict=True)]

    def _total(self, part: BatchValue) -> Tensor | float:
        if part.value.device.type == "cpu":
            return part.value.item() * part.weight
        return part.total(self._dtype)

    def _number(self, value: Tensor | float) -> Tensor | float:
        """Return a number if the host knows it; a tensor on the device stays there, because reading it would wait."""
        if not isinstance(value, Tensor):
            return float(value)
        return value.item() if value.device.type == "cpu" else value.to(self._dtype)

    def tensor(self) -> Tensor:
        """Return the sums on the device, flat; with ordered sums a row for each micro batch."""
        assert self.names
        size, rows = 2 * len(self.names), self._micros if self._is_ordered else 1
        if self._device.type == "cpu":
            nothing: list[Tensor | float] = [0.0] * size
            return torch.tensor([self._sums.get(row, nothing) for row in range(rows)], dtype=self._dtype).view(-1)
        if self._is_ordered:
            table = torch.zeros(rows, size, dtype=self._dtype, device=self._device)
            for number, values in self._sums.items():
                for cell, value in zip(table[number].unbind(), values, strict=True):
                    cell.copy_(value) if isinstance(value, Tensor) else cell.fill_(value)
            return table.view(-1)
        return self._on_device(self._sums.get(0, [0.0] * size))

    def _on_device(self, values: list[Tensor | float]) -> Tensor:
        """Return the values in one tensor on the device, without a copy from the host, which would wait."""
        if self._row is None:
            self._row = torch.zeros(len(values), dtype=self._dtype, device=self._device)
            self._filled = [0.0] * len(values)
        half = len(values) // 2
        totals = [value for value in values[:half] if isinstance(value, Tensor)]
        if len(totals) == half:  # one kernel for all
            torch.stack(totals, out=self._row[:half])
            self._filled[:half] = [None] * half
        for place in range(half if len(totals) == half else 0, len(values)):
            value = values[place]
            if isinstance(value, Tensor):
                self._row[place].copy_(value)
                self._filled[place] = None
            elif self._filled[place] != value:
                self._row[place].fill_(value)
                self._filled[place] = value
        return self._row

    def summed(self, reduced: Tensor) -> Tensor:
        """Return the sums over all ranks, from what the strategy has reduced of `tensor`."""
        return reduced.view(self._micros, -1).sum(0) if self._is_ordered else reduced

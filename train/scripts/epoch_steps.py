"""Steps that a script counts from the start of each epoch (`Epoch: [3]  [10/100]`), turned into steps that count on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..run.metrics import IN_EPOCH


class EpochSteps:
    """Adds to each step the steps of the epochs before, once a step has fallen while the epoch has risen.

    Args:
        before: The lines of earlier attempts.
    """

    def __init__(self, before: Iterable[Any] = ()) -> None:
        self._begins: dict[int, int] = {}
        """Maps an epoch to the number of steps before it."""
        self._last: tuple[int, int] | None = None
        """Epoch and step of the last line, as the script counts them."""
        self._length, self._stride, self._is_needed = 0, 1, False
        self.has_before = False
        for line in before:
            self.has_before = True
            if "epoch" in line:
                step = line.get(IN_EPOCH, line["step"])
                self._is_needed |= IN_EPOCH in line
                self._note(line["epoch"], step, line["step"] - step)

    def count(self, line: dict[str, Any]) -> dict[str, Any]:
        """Return the line with a step that counts on. The total number of steps is an epoch's then, and left out."""
        if "epoch" not in line:
            return line
        epoch, step, total = line["epoch"], line["step"], line.get("total_steps") or 0
        begin = self._begins.get(epoch, 0) if self._is_needed else 0
        if self._last is not None and epoch > self._last[0] and epoch not in self._begins:
            has_fallen = _is_anew(step, self._last[1], total)
            if has_fallen:
                self._length = total or self._length or self._last[1] + self._stride - step
                self._is_needed = True
            if self._is_needed:
                begin = self._begins[self._last[0]] + self._length * (epoch - self._last[0])
        self._note(epoch, step, begin)
        if not self._is_needed:
            return line
        more = {"total_steps": None} if total else {}
        return {**line, **more, "step": begin + step, **({IN_EPOCH: step} if begin else {})}

    def _note(self, epoch: int, step: int, begin: int) -> None:
        if self._last is not None and self._last[0] == epoch and step > self._last[1]:
            self._stride = step - self._last[1]
        if begin and self._last is not None and epoch > self._last[0]:
            self._length = (begin - self._begins.get(self._last[0], 0)) // (epoch - self._last[0])
        self._begins[epoch], self._last = begin, (epoch, step)


def _is_anew(step: int, last: int, total: int) -> bool:
    """Whether the first step of an epoch shows that each epoch counts its steps from the start."""
    return step < last or (step == last and (step == 0 or 0 <= total - step <= 1))

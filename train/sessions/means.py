"""The means that a script keeps over an epoch, such as that of its loss. A checkpoint holds them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..errors import Refused


class Means:
    """This rank's means since the epoch began."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Any, int]] = {}
        """Maps a name to the sum of its values, a number or a tensor, and to their number."""

    def clear(self) -> None:
        """An epoch begins."""
        self._sums = {}

    def add(self, name: str, value: Any) -> Any:
        """Add a value. Returns the mean: a tensor if the value is one, so that nothing waits for a GPU.

        Raises:
            Refused: the value is no number.
        """
        total, count = self._sums.get(name, (0.0, 0))
        try:
            total = total + (value.detach().reshape(()).double() if isinstance(value, Tensor) else float(value))
        except (TypeError, ValueError, RuntimeError):
            raise Refused(f"session.mean({name!r}, …) takes a number, not {type(value).__name__}") from None
        self._sums[name] = total, count + 1
        return total / (count + 1)

    def read(self, name: str) -> float:
        """Return the mean.

        Raises:
            Refused: it has no value.
        """
        if name not in self._sums:
            raise Refused(f"session.mean({name!r}) has no value in this epoch; add one: session.mean({name!r}, loss)")
        total, count = self._sums[name]
        return float(total) / count

    def state(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {name: [float(total), count] for name, (total, count) in self._sums.items()}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        self._sums = {name: (total, count) for name, (total, count) in state.items()}

"""The losses of a step and their parts, as metrics.jsonl has them: from the sums over all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from ..build.updates import Update, parts_kept
from ..data.plan import Plan
from .step_stats import COUNT, COUNTED, LOSS, STATS, StepStats

Figures = dict[str, float]
"""Figures by their names in metrics.jsonl."""
Sums = Sequence[float]
"""The sums of an update's stats: see `StepResult.sums`."""


class Losses:
    """Turns the sums of a step into figures. If updates leave out steps, remembers the last loss of each, because every
    line has all of them."""

    def __init__(
        self, updates: Sequence[Update], stats: Mapping[str, StepStats], *, plan: Plan, leaves_out: bool,
        kept: Mapping[str, Tensor], done: int,
    ) -> None:  # fmt: skip
        """
        Args:
            stats: of each update.
            leaves_out: samples that cannot be read are left out.
            kept: the last sums of updates that leave out steps, as of step `done`, after which the attempt continues.
        """
        self._stats, self._leaves_out = {_name(name): one for name, one in stats.items()}, leaves_out
        self._last: Figures | None = {} if kept else None
        for update in updates if kept else ():
            name, last = _name(update.name), done - done % update.every
            if update.name not in kept:
                continue
            sums = kept[update.name].tolist()
            if sums[COUNT]:  # else none was made yet
                parts = len(self._stats[name].parts.names or ())
                sums += kept[parts_kept(update.name)][: 2 * parts].tolist()  # there is room for more parts
                self._remember(name, self._mean(sums, plan.samples(last - 1)), self._parts(name, sums))

    def of_step(self, updates: Mapping[str, Sums], samples: int) -> tuple[Figures, Figures]:
        """Return the losses of the updates of a step of this many samples, and their parts."""
        losses, parts = Figures(), Figures()
        for update, sums in updates.items():
            name = _name(update)
            losses[name], of_it = self._mean(sums, samples), self._parts(name, sums)
            parts |= of_it
            self._remember(name, losses[name], of_it)
        return losses, parts

    def of_line(self, losses: Figures, parts: Figures) -> tuple[Figures, Figures]:
        """Return the losses and parts of the line of a step: for updates that the step left out those of earlier
        steps."""
        if self._last is None:
            return losses, parts
        known = self._last | losses | parts
        names = [f"{name}.{part}" for name, one in self._stats.items() for part in one.parts.names or ()]
        return (
            {name: known[name] for name in self._stats if name in known},
            {name: known[name] for name in names if name in known},
        )

    def _remember(self, name: str, loss: float, parts: Figures) -> None:
        if self._last is not None and math.isfinite(loss):
            self._last |= {name: loss, **parts}

    def _mean(self, sums: Sums, samples: int) -> float:
        count = sums[COUNT] if sums[COUNTED] or self._leaves_out else samples
        return sums[LOSS] / count if sums[COUNT] else 0.0

    def _parts(self, name: str, sums: Sums) -> Figures:
        names = self._stats[name].parts.names or ()
        totals, counts = sums[len(STATS) : len(STATS) + len(names)], sums[len(STATS) + len(names) :]
        return {
            f"{name}.{part}": total / count if count else 0.0
            for part, total, count in zip(names, totals, counts, strict=True)
        }


def _name(update: str) -> str:
    """Return the name in metrics.jsonl of an update's loss."""
    return f"loss.{update}" if update else "loss"

"""Which steps evaluate, save, log and end the run. Known before a run begins, and the same on every rank and attempt.

Both the loader, which fetches ahead, and the loop use it. Steps are counted from 1 here; 0 is before the first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..config import Config
from ..data.plan import Plan

_LEAST = 1e-9
"""Minimum number of steps between evaluations, because 0 means something else."""


@dataclass(frozen=True)
class Intervals:
    """What happens after which step. What a clock or a user decides, such as `checkpoint.every_minutes`, is not
    here."""

    total_steps: int
    evaluate_every: float
    """Number of steps, may be a fraction; 0: only at the end; infinite: never."""
    save_every: int | None
    saves_evaluations: bool
    log_every: int = 1

    @classmethod
    def of(cls, config: Config, plan: Plan, total_steps: int, has_evaluation: bool) -> Intervals:
        """Return the intervals that a configuration asks for."""
        every = config.eval.every_steps or (config.eval.every_epochs or 0) * plan.steps_per_epoch
        every = every if has_evaluation else math.inf
        every = max(every, _LEAST) if every else 0
        saved = config.checkpoint
        return cls(total_steps, every, saved.every_steps, bool(saved.best), config.log.every_steps)

    def logs(self, step: int) -> bool:
        """Whether metrics.jsonl gets a line of this step."""
        return step % self.log_every == 0 or step == self.total_steps

    def evaluates(self, step: int) -> bool:
        """Whether an evaluation belongs after this step."""
        if step == 0 or math.isinf(self.evaluate_every):
            return False
        return step == self.total_steps or self._passes(self.evaluate_every, step - 1, step)

    def saves(self, step: int) -> bool:
        """Whether a checkpoint belongs after this step."""
        return self.misses_save(step - 1, step)

    def misses_save(self, saved: int, step: int) -> bool:
        """Whether a checkpoint belongs after this step or an earlier one, if the newest is of step `saved`."""
        saved = max(saved, 0)
        if saved >= step:
            return False
        if step == self.total_steps or (self.saves_evaluations and self._passes(self.evaluate_every, saved, step)):
            return True
        return self.save_every is not None and self._passes(self.save_every, saved, step)

    @staticmethod
    def _passes(every: float, before: int, step: int) -> bool:
        """Whether a multiple of `every` steps lies after `before`, and not after `step`."""
        return 0 < every < math.inf and math.floor(step / every) > math.floor(before / every)


class SaveClock:
    """Tells when this many minutes have passed since the last save. Rank 0's clock decides for all."""

    def __init__(self, minutes: float, since: float = 0.0, now: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            since: seconds that have already passed since the last save.
        """
        self._seconds, self._now = minutes * 60, now
        self._since = now() - since

    def restart(self) -> None:
        self._since = self._now()

    def is_due(self) -> bool:
        return self._seconds > 0 and self._now() - self._since >= self._seconds

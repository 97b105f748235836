"""Which steps save, evaluate, end. Pure: known before a run begins, the same on every rank and in every attempt.

Both the loader, which fetches ahead, and the loop go by it. Steps are counted from 1 here; 0 is before the first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from train.config import Config
from train.data.plan import MicroBatch, Plan, Sharing, evaluation_micro_batches, micro_batches_of

_LOOK_AHEAD = 4096
"""Steps among which the next evaluation is looked for at a time."""
_LEAST = 1e-9
"""Steps between evaluations: with any smaller share of one a step would be an infinite number of them."""


@dataclass(frozen=True)
class Agenda:
    """What happens after which step. What a clock or a user decides, as `checkpoint.every_minutes`, is not here."""

    total_steps: int
    evaluate_every: float
    """Steps, fractions too; 0: at the end only; infinite: never."""
    save_every: int | None
    saves_evaluations: bool

    def evaluates(self, step: int) -> bool:
        """Whether an evaluation belongs after this step."""
        if step == 0 or math.isinf(self.evaluate_every):
            return False
        return step == self.total_steps or self._passes(self.evaluate_every, step - 1, step)

    def saves(self, step: int) -> bool:
        """Whether a checkpoint belongs after this step."""
        return self.misses_save(step - 1, step)

    def misses_save(self, saved: int, step: int) -> bool:
        """Whether a checkpoint belongs after this step or one before it, where the newest is of step `saved`."""
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


def agenda_of(config: Config, plan: Plan, total_steps: int, has_evaluation: bool) -> Agenda:
    """The agenda of a run."""
    every = config.eval.every_epochs * plan.steps_per_epoch if has_evaluation else math.inf
    every = max(every, _LEAST) if every else 0
    return Agenda(total_steps, every, config.checkpoint.every_steps, bool(config.checkpoint.best))


def micro_batches(
    agenda: Agenda, plan: Plan, evaluation: Plan | None, sharing: Sharing, done: int, evaluated: int
) -> Iterator[MicroBatch]:
    """All that a rank fetches after step `done`, evaluations among it, in the order in which the loop takes it.

    Args:
        evaluated: the last step after which an evaluation is on record; -1 without one.
    """
    first = done
    for step in range(done, agenda.total_steps + 1):
        is_evaluated = evaluated < step and agenda.evaluates(step)
        if is_evaluated or step - first == _LOOK_AHEAD:
            yield from micro_batches_of(plan, sharing, first, step)
            first = step
        if is_evaluated:
            assert evaluation is not None
            yield from evaluation_micro_batches(evaluation, sharing)
    yield from micro_batches_of(plan, sharing, first, agenda.total_steps)

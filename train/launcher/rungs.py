"""Checks the steps after which a sweep compares its trials (--rungs)."""

from __future__ import annotations

from collections.abc import Sequence

from ..build import objects, schedule
from ..config import Config
from ..data.plan import Plan as EpochPlan
from ..errors import Refused
from ..tasks import Task
from ..trainer.intervals import Intervals


def check(rungs: Sequence[int], task: Task, config: Config, *, cut: EpochPlan, has_evaluation: bool) -> None:
    """Check that a trial of a sweep can be compared after these steps.

    Args:
        cut: How an epoch is cut into batches.

    Raises:
        Refused: it ends before, has no evaluation by then, or its learning rate depends on its length.
    """
    total = objects.total_steps(config, cut)
    if rungs[-1] >= total:
        raise Refused(f"--rungs {rungs[-1]}: a trial ends with step {total}; give smaller steps, or longer trials")
    if problem := schedule.why_relative(task, config):
        raise Refused(
            f"--rungs: {problem}, so trials would be compared in the middle of it; give it a length of its "
            "own, --schedule.total_epochs N, or --schedule.decay constant"
        )
    evaluates = Intervals.of(config, cut, total, has_evaluation).evaluates
    if has_evaluation and not any(map(evaluates, range(1, rungs[0] + 1))):
        raise Refused(f"--rungs {rungs[0]}: no evaluation comes before; give --eval.every_steps {rungs[0]}")

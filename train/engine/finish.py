"""How training ended, written down by rank 0."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from train import faults
from train.errors import FINISHED, STOPPED, Refused, TrainingFailed
from train.record import heartbeat, store

if TYPE_CHECKING:
    from train.engine.loop import Done, Job
from train.checkpoint.state import weights_of, weights_sha256
from train.engine.setup import Done, Job
from train.record.best import facts
from train.record.metrics import last_evaluation


def conclude(job: Job, outcome: Done) -> int:
    """Record how training ended. On rank 0; the other ranks have nothing to say.

    Raises:
        TrainingFailed: it cannot be recorded; a resume will find the last checkpoint and do so.
    """
    job.report.sync()
    job.heart.beat(heartbeat.ENDING, outcome.step)
    # a collective where the weights are spread, so before the first rank is alone
    digest = "" if outcome.stopped else weights_sha256(weights_of(job.strategy.module), job.world.is_first)
    if not job.world.is_first:
        return STOPPED if outcome.stopped else FINISHED
    epoch = job.plan.epoch_of(outcome.step)
    record: dict[str, Any] = {"step": outcome.step, "epoch": epoch, "ended": store.now(), **facts(job.run)}
    if outcome.stopped:
        reason = job.stop.reason or "another rank was asked to"
        _record_end(job, state=store.STOPPED, reason=f"stopped after step {outcome.step} ({reason})", **record)
        job.report.say(
            f"stopped after step {outcome.step} of {job.total_steps}; continue with: train resume {job.run.name}"
        )
        return STOPPED
    evaluation = last_evaluation(job.run)
    figures = dict(evaluation["eval"]) if evaluation else {}
    faults.here("finish")
    _record_end(job, state=store.FINISHED, reason="", weights_sha256=digest, metrics=figures, **record)
    faults.here("finished")
    job.report.say(f"finished after {outcome.step} steps; weights {digest[:16]}…")
    return FINISHED


def _record_end(job: Job, **values: Any) -> None:
    try:
        job.run.update(**values)
    except (OSError, Refused) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise TrainingFailed(
            f"the last checkpoint is saved, but that the run is {values['state']} cannot be recorded ({reason}); "
            f"continue with: train resume {job.run.name}"
        ) from error

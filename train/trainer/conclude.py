"""How the end of training is recorded, with the digest of the weights."""

from __future__ import annotations

import dataclasses

from .. import config as configuration
from .. import faults
from ..build.optimizer import evaluated_weights
from ..checkpoint.state_dict import weights_of, weights_sha256
from ..errors import TrainingFailed
from ..run import best, heartbeat, outcome
from ..run.metrics import last_evaluation
from ..run.outcome import Kind, Outcome
from ..signals import RUNG
from .setup import Job
from .train import Done


def conclude(job: Job, done: Done, attempt: int) -> Outcome:
    """Record how training ended; rank 0 also logs it.

    Raises:
        TrainingFailed: the end cannot be recorded. A resume finds the last checkpoint and records it.
    """
    job.loggers.sync()
    job.loggers.times(done.times)
    job.heart.beat(heartbeat.SAVING, done.step)  # others may still wait for this rank
    faults.here("digest")
    weights = "" if done.stopped else digest(job)  # before the first rank is alone
    job.heart.beat(heartbeat.ENDING, done.step)
    reason = (job.stop.reason or "another rank was asked to") if done.stopped else done.reason
    kind, by = (Kind.STOPPED, job.stop.by) if done.stopped else (Kind.FINISHED, "")
    end = Outcome(rank=job.world.rank, kind=kind, step=done.step, reason=reason, by=by if by == RUNG else "")
    if not job.world.is_first:
        return end
    figures = {"epoch": job.data.plan.epoch_of(done.step), **best.facts(job.run, job.config.checkpoint.best)}
    if done.stopped:
        text = f"stopped after step {done.step} of {job.total_steps}; continue with: train resume {job.run.name}"
    else:
        evaluation = last_evaluation(job.run)
        faults.here("finish")
        figures |= {"weights_sha256": weights, "metrics": dict(evaluation["eval"]) if evaluation else {}}
        why = f" ({reason})" if reason else ""
        text = f"finished after {done.step} steps{why}; weights {weights[:16]}…"
    end = dataclasses.replace(end, figures=figures)
    try:
        outcome.write(job.run.logs(attempt), end)
    except OSError as error:
        raise TrainingFailed(
            f"the last checkpoint is saved, but the end of the run ({end.kind}) cannot be recorded "
            f"({error.strerror}); continue with: train resume {job.run.name}"
        ) from error
    if not done.stopped:
        faults.here("finished")
    job.loggers.say(text)
    return end


def digest(job: Job) -> str:
    """Return the digest of the weights as they are evaluated, on rank 0; '' on other ranks. A collective if they are
    sharded."""
    job.snapshots.hold()
    with evaluated_weights(job.optimizer):
        found = weights_sha256(weights_of(job.strategy.module), job.world.is_first)
    if configuration.strategies.of(job.config.parallel.strategy).splits_parameters:
        # a rank that has sent its part must not end while the first one still receives: wait for all, on the host,
        # where a call returns only once all ranks have made it
        job.world.gather(None)
    return found

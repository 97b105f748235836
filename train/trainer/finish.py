"""Records how training ended: each rank its outcome, rank 0 with the figures of the run."""

from __future__ import annotations

from train import config as configuration
from train import faults
from train.checkpoint.state import weights_of, weights_sha256
from train.errors import TrainingFailed
from train.run import heartbeat, outcome
from train.run.best import facts
from train.run.metrics import last_evaluation
from train.run.outcome import Kind, Outcome
from train.trainer.setup import Job
from train.trainer.train import Done


def conclude(job: Job, done: Done, attempt: int) -> Outcome:
    """Record how training ended; rank 0 also logs it.

    Raises:
        TrainingFailed: it cannot be recorded; a resume will find the last checkpoint and do so.
    """
    job.loggers.sync()
    job.loggers.times(done.times)
    job.heart.beat(heartbeat.SAVING, done.step)  # others may still wait for this rank
    faults.here("digest")
    weights = "" if done.stopped else digest(job)  # before the first rank is alone
    job.heart.beat(heartbeat.ENDING, done.step)
    reason = (job.stop.reason or "another rank was asked to") if done.stopped else ""
    end = Outcome(job.world.rank, Kind.STOPPED if done.stopped else Kind.FINISHED, done.step, reason)
    if not job.world.is_first:
        return end
    figures = {"epoch": job.plan.epoch_of(done.step), **facts(job.run)}
    if done.stopped:
        text = f"stopped after step {done.step} of {job.total_steps}; continue with: train resume {job.run.name}"
    else:
        evaluation = last_evaluation(job.run)
        faults.here("finish")
        figures |= {"weights_sha256": weights, "metrics": dict(evaluation["eval"]) if evaluation else {}}
        text = f"finished after {done.step} steps; weights {weights[:16]}…"
    end = Outcome(end.rank, end.kind, end.step, end.reason, figures=figures)
    try:
        outcome.write(job.run.logs(attempt), end)
    except OSError as error:
        raise TrainingFailed(
            f"the last checkpoint is saved, but that the run is {end.kind} cannot be recorded ({error.strerror}); "
            f"continue with: train resume {job.run.name}"
        ) from error
    if not done.stopped:
        faults.here("finished")
    job.loggers.say(text)
    return end


def digest(job: Job) -> str:
    """The digest of the weights on rank 0, '' on others. A collective where they are sharded."""
    found = weights_sha256(weights_of(job.strategy.module), job.world.is_first)
    if job.config.parallel.strategy in configuration.SPREAD:
        # a rank that has sent its part must not end while the first one still receives: wait for all, on the host,
        # where a call returns only once all ranks have made it
        job.world.gather(None)
    return found

"""Refuses a run in which BatchNorm would get a micro batch of one sample.

torch refuses to train on one value per channel, but only in the step in which it happens. The plan knows all sizes
before the first step, so the run is refused at launch.
"""

from __future__ import annotations

from torch import nn

from .. import causes, doing
from ..build import objects
from ..build.freeze import set_training
from ..build.loss import training_loss
from ..build.updates import read_updates
from ..config import Config
from ..data.plan import Plan
from ..errors import Refused
from ..parallel.precision import cpu_precision
from ..parallel.torch_private import BatchNorm, without_compiler
from ..tasks import Task
from .case import Case, Kind
from .resumable import fork_of


def check(case: Case) -> None:
    """Check that BatchNorm can train in all steps of the launch. Builds the model if a micro batch has one sample.

    Raises:
        Refused: a micro batch has one sample, and a forward pass on it fails.
    """
    plan, ranks = case.cut, case.ranks
    step = first_alone(plan, range(case.step, case.total))
    if step is None or not _fails(case.task, case.config, case.train_set, case.model, ranks):
        return
    samples, size = plan.samples(step), plan.micro_batch_size
    flags, ways = {"batch_size": "N"}, ["another --batch_size"]
    if samples > 1:
        ways.append("another --micro_batch_size")
    if samples < plan.batch_size <= plan.length:
        flags = {"data.drop_last": "true"}
        ways.insert(0, "--data.drop_last true")
    elif ranks > 1:
        ways.append("fewer ranks")
    batch = (
        f"{samples} samples in its batch, at most {size} in a micro batch" if samples > 1 else "1 sample in its batch"
    )
    raise Refused(
        f"BatchNorm cannot train on one sample, and step {step + 1} has such a micro batch ({batch}); "
        f"use {', or '.join(ways)}{_way(case, flags)}"
    )


def _way(case: Case, fields: dict[str, str]) -> str:
    """Return the end of a refusal about fields that a resume may not change."""
    if case.kind is not Kind.RESUME:
        return ""
    run = case.of.run
    more = fork_of(run, case.of.flags | fields) if run.newest_checkpoint else "it has no checkpoint, so start a new run"
    return f"; {more}"


def first_alone(plan: Plan, steps: range) -> int | None:
    """Return the first of these steps in which a micro batch has one sample, or None."""
    begin, epoch = steps.start, plan.steps_per_epoch
    last = begin + (-1 - begin) % epoch  # of the epoch; the steps before it and after it have equal sizes
    return next((step for step in (begin, last, last + 1) if step in steps and plan.smallest(step) == 1), None)


def _fails(task: Task, config: Config, train_set: object, model: nn.Module, ranks: int) -> bool:
    """Whether a forward pass of one sample fails in torch's BatchNorm. Always computed on the CPU."""
    set_training(model, config.freeze)
    for part in model.modules():
        if isinstance(part, nn.SyncBatchNorm) and ranks > 1:
            part.eval()  # it computes over all ranks
    norms = [part for part in model.modules() if isinstance(part, BatchNorm) and part.training]
    if not norms or (config.sync_batchnorm and ranks > 1):
        return False
    precision = cpu_precision(config)
    try:
        batch = objects.first_samples(task, config, precision=precision, dataset=train_set, count=1)
        with doing.now("a first step on one sample"), without_compiler(), precision.autocast():
            for update in read_updates(task, model, config):
                training_loss(update.loss, lambda loss: loss(model), batch=batch, samples=1, what=update.what)
    except Exception as error:  # any other error is reported better by the run itself
        return causes.BATCH_NORM.matches(str(error))
    return False

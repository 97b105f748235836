"""A loss or gradients that are not finite: why a run ends, and what `on_nan skip` leaves out."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import TrainingFailed
from ..parallel.strategy import local
from ..parallel.world import World
from .setup import Job

_MOST = 10
"""Maximum number of steps in a row that may be left out."""


def why_it_ends(losses: dict[str, float], step: int) -> str:
    """Return why the losses of a step end the run, and what to do."""
    name, loss = next((pair for pair in losses.items() if not math.isfinite(pair[1])), ("sum of losses", math.inf))
    if step == 1:  # no update was made yet
        return (
            f"the {name} is {loss} at step 1, with the initial weights, so the learning rate is not the cause; look at "
            "the data of that step (--log.samples true), and at what model() and loss() compute from them"
        )
    return (
        f"the {name} is {loss} at step {step}; lower --optim.lr or set --clip_grad_norm, and look at the data of that "
        "step (--log.samples true); --on_nan skip leaves such steps out (a resume may)"
    )


def is_finite(sums: Tensor, parameters: list[torch.nn.Parameter], world: World) -> bool:
    """Whether the stats of a step and all its gradients are finite. Waits for the device. A collective."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    gradients = [one.coalesce().values() if one.is_sparse else one for one in gradients]
    bad = torch.stack([~torch.isfinite(one).all() for one in (sums, *gradients)]).any()
    return not world.add(bad.to(torch.float32)).item()  # with fsdp each rank sees its part of them


def note_skipped(job: Job, steps: list[int], step: int) -> None:
    """Record that the update of a step (counted from 1) was left out, and say so.

    Raises:
        TrainingFailed: too many in a row were left out.
    """
    steps.append(step)
    if job.world.is_lead:
        job.run.note(nan_steps=len(steps))
    job.loggers.say(f"warning: the update of step {step} is left out: its loss or a gradient is not finite")
    if steps[-_MOST:] == [*range(step - _MOST + 1, step + 1)]:
        raise TrainingFailed(
            f"{_MOST} steps in a row, up to step {step}, had a loss or gradients that are not finite; lower "
            "--optim.lr or set --clip_grad_norm, and look at the data of these steps (--log.samples true)"
        )

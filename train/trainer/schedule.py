"""The learning rate: scaling rule, warm-up, decay. A function of the step, so nothing of it is saved."""

from __future__ import annotations

import math

from train.config import Config


def scale(config: Config) -> float:
    """The factor between optim.lr and the peak learning rate.

    linear: batch_size / base_batch_size (Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 2.1);
    sqrt: its square root (Krizhevsky, "One weird trick", 2014, section 5).
    """
    ratio = config.batch_size / config.schedule.base_batch_size
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[config.schedule.scaling]


def factor(config: Config, step: int, steps_per_epoch: int, total_steps: int) -> float:
    """What the peak learning rate is multiplied with in this step (counted from 0).

    The warm-up rises linearly and reaches 1 with its last step. Cosine decay (Loshchilov and Hutter, "SGDR", 2017)
    would reach 0 at total_steps, so every step has a positive rate.
    """
    schedule = config.schedule
    warmup = min(round(schedule.warmup_epochs * steps_per_epoch), total_steps)
    if step < warmup:
        return (step + 1) / warmup
    if schedule.decay == "cosine":
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(total_steps - warmup, 1)))
    if schedule.decay == "step":
        return schedule.gamma ** math.floor(step / (schedule.step_epochs * steps_per_epoch) + 1e-9)
    return 1.0

"""`train bench lr TASK`: a learning-rate range test, the loss of a model while its rate rises exponentially.

Smith, "Cyclical Learning Rates for Training Neural Networks", 2017, section 3.3. One process, and no run.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from train.config import Config
from train.data.loader import Loader
from train.data.plan import Sharing, micro_batches_of
from train.data.seeding import owned, seed_compute
from train.errors import Refused
from train.launcher import checks
from train.launcher.request import Request
from train.parallel.devices import pick_device
from train.parallel.precision import Precision
from train.parallel.strategy import STEP_STATS
from train.parallel.world import World
from train.run.durable import check_target, published
from train.tasks import Task
from train.trainer import build, determinism, setup
from train.trainer.freeze import set_training
from train.trainer.loss import training_loss
from train.trainer.updates import spread_updates

FIRST, LAST = 1e-7, 10.0
"""Rates of the first and the last step."""
_SMOOTH, _LEAST, _BLOWN = 0.9, 10, 4.0
"""The weight of what came before in the mean of the losses, the fewest steps, and how many times the first loss ends
the test."""


def bench(folder: Path, times: int, request: Request, target: Path) -> str:
    """Make so many steps, draw the loss over the rate, and return a suggestion.

    Raises:
        Refused: the task cannot be trained, has several updates, or its loss shows nothing.
    """
    check_target(target, (".png", ".svg", ".pdf"))
    prepared = checks.prepare(request)
    if prepared.task.updates is not None:
        raise Refused(f"train bench lr varies one rate, and {prepared.task.file} has several updates")
    with build.refusing(prepared.task):
        rates, losses = measure(prepared.task, prepared.config, times)
    if len(losses) < _LEAST:
        raise Refused(f"the loss shows nothing after {len(losses)} steps; give more of them with --times")
    # means of the losses so far, young ones corrected for their beginning at 0 (Kingma and Ba, "Adam", 2015, section 3)
    means, mean = [], 0.0
    for step, loss in enumerate(losses, 1):
        mean = _SMOOTH * mean + (1 - _SMOOTH) * loss
        means.append(mean / (1 - _SMOOTH**step))
    steepest = float(rates[int(np.argmin(np.gradient(means, np.log(rates))))])
    with published(target) as partial:
        _draw(rates, losses, means, steepest, partial)
    return f"the loss falls steepest at --optim.lr {steepest:.2g}; drawn over the rate in {target}"


def measure(task: Task, config: Config, steps: int) -> tuple[list[float], list[float]]:
    """The rates, and the losses with them, up to where the loss blows up."""
    determinism.set_determinism(config)
    device = pick_device(config, 1, 0)
    precision, world, sharing = Precision(config.precision, device), World(0, 1, 0, device), Sharing()
    train_set, _ = build.make_datasets(task, config)
    plan = build.plan_of(config, len(train_set))
    loader = Loader(
        train_set, {}, task.collate, 0, device, precision.inputs, None, config.channels_last, task.on_device,
        task.datasets,
    )  # fmt: skip
    model = setup.arrange(build.make_model(task, config, precision.weights), config, 1)
    (update,), _ = spread_updates(task, model, config, world, precision)
    strategy, groups = update.strategy, update.optimizer.param_groups
    peaks = [float(group["lr"]) / float(groups[0]["lr"]) for group in groups]
    set_training(strategy.module, config.freeze)
    strategy.start()
    batches = loader.batches(micro_batches_of(plan, sharing, 0, steps))
    generators = owned(strategy.module, update.loss)
    stats = torch.zeros(len(STEP_STATS), dtype=strategy.stats_dtype, device=device)
    rates: list[float] = []
    losses: list[float] = []
    for step in range(steps):
        rates.append(FIRST * (LAST / FIRST) ** (step / max(steps - 1, 1)))
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * rates[-1]
        micros, total = plan.micro_batches(step), 0.0
        strategy.begin(micros)
        for number in range(micros):
            micro, batch = next(batches)
            seed_compute(micro.seed, device, own=generators)
            with strategy.micro_batch(number, number == micros - 1):
                with precision.autocast():
                    loss = training_loss(update.loss, strategy.compute, batch, len(micro.indices), update.what)
                value = loss.value / loss.count if loss.count is not None else loss.value
                share = len(micro.indices) / plan.samples(step)
                strategy.backward(value, share, stats if number == micros - 1 else None)
            total += float(value.detach()) * share
        strategy.reduce(stats)
        strategy.scale_and_clip_gradients(update.optimizer, config.clip_grad_norm)
        strategy.update(update.optimizer)
        if not math.isfinite(total) or total > _BLOWN * abs(losses[0] if losses else total):
            return rates[:-1], losses
        losses.append(total)
    return rates, losses


def _draw(rates: list[float], losses: list[float], means: list[float], steepest: float, target: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure((7, 4), layout="constrained")
    axis = figure.subplots()
    axis.plot(rates, losses, color="C0", alpha=0.3)
    axis.plot(rates, means, color="C0")
    axis.axvline(steepest, color="grey", linestyle="--", label=f"steepest: {steepest:.2g}")
    axis.set(xscale="log", xlabel="learning rate", ylabel="loss")
    axis.legend(frameon=False)
    figure.savefig(target, dpi=120)

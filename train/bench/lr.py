"""`train bench lr TASK`: a learning-rate range test, the loss of a model while its rate rises exponentially.

Smith, "Cyclical Learning Rates for Training Neural Networks", 2017, section 3.3. One process, and no run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
from pathlib import Path

import numpy as np

from ..build import objects
from ..build.freeze import set_training
from ..build.schedule import rate_scale
from ..errors import Refused
from ..launcher import checks
from ..launcher.request import Request
from ..parallel.rank_env import RankEnv
from ..run import folders
from ..run.durable import check_target, published
from ..run.heartbeat import Heart
from ..run.spec import read_spec
from ..signals import StopRequest
from ..trainer import setup
from ..trainer.step_stats import COUNT, LOSS
from ..trainer.train import Loop

FIRST, LAST = 1e-7, 10.0
"""Rates of the first and the last step."""
_SMOOTH, _LEAST, _BLOWN = 0.9, 10, 4.0
"""Weight of earlier losses in the running mean; minimum number of steps; multiple of the first loss that ends the
test."""
_FIELDS = {
    "eval.every_epochs": "0", "checkpoint.asynchronous": "false", "log.tensorboard": "false", "log.wandb": "",
    "early_stopping.metric": "",
}  # fmt: skip
"""Fields of a run that is not evaluated, saved or shown."""


def bench(folder: Path, times: int, request: Request, target: Path) -> str:
    """Make this many steps, draw the loss over the rate, and return a suggestion.

    Raises:
        Refused: the task cannot be trained, has several updates, or its loss shows nothing.
    """
    check_target(target, (".png", ".svg", ".pdf"))
    rates, losses = measure(folder, request, times)
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
    return f"the loss falls steepest at --optim.lr {steepest:.2g}; {target} shows the loss over the rate"


def measure(folder: Path, request: Request, steps: int) -> tuple[list[float], list[float]]:
    """Return the rates and their losses up to where the loss blows up. The run's folder is removed afterwards.

    Raises:
        Refused: the task cannot be trained, or has several updates.
    """
    ours = ("epochs", "eval.every_steps", "early_stopping.")
    flags = {name: text for name, text in request.flags.items() if not name.startswith(ours)}
    prepared = checks.prepare(dataclasses.replace(request, flags=flags | _FIELDS | {"steps": str(steps)}))
    if prepared.task.updates is not None:
        raise Refused(f"train bench lr varies one rate, but {prepared.task.file} has several updates")
    rates: list[float] = []
    losses: list[float] = []
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=folder) as name, contextlib.ExitStack() as held:
        record = prepared.record | {"task": str(prepared.task.file)}  # messages name it, and no copy that is gone
        run = folders.create(Path(name), "lr", files=prepared.files, record=record)
        attempt = run.begin_attempt(1, 0)
        heart = Heart(run.logs(attempt) / "rank0.beat")
        held.enter_context(objects.refusing(prepared.task))
        job = setup.set_up(
            run, read_spec(run), RankEnv(), attempt=attempt, stop=StopRequest(()), bar=False, heart=heart, held=held
        )
        peak = float(job.optimizer.param_groups[0]["lr"]) * rate_scale(job.config)
        job.task = dataclasses.replace(
            job.task, schedule=lambda step, total, _: FIRST / peak * (LAST / FIRST) ** (step / max(total - 1, 1))
        )
        loop = Loop(job)
        set_training(job.strategy.module, job.config.freeze)
        job.strategy.start()
        for _ in range(steps):
            loop.step()
            ((made, updates, _),) = loop.readback.take(everything=True)
            (sums,) = updates.values()
            loss = sums[LOSS] / (sums[COUNT] or 1)
            if not math.isfinite(loss) or loss > _BLOWN * abs(losses[0] if losses else loss):
                break
            rates.append(made.rate)
            losses.append(loss)
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

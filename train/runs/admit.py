"""Everything that can be wrong with a new run is found here, before anything is created."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import train
from train import config as configuration
from train import gpus
from train.config import Config
from train.data import fingerprint
from train.data.fetch import is_indexed_at_once
from train.engine import build, cpu
from train.engine.loggers import wandb
from train.engine.optimizer import make_optimizer
from train.errors import Refused, nearest
from train.parallel import cards, choose
from train.parallel.precision import Precision
from train.parallel.units import recompute
from train.parallel.world import pick_device
from train.record import best
from train.runs import imports
from train.runs.request import Request, resolve
from train.tasks import Task


@dataclasses.dataclass
class Prepared:
    """A run that has passed every check: what to create its folder with."""

    task: Task
    config: Config
    files: dict[str, str | bytes]
    record: dict[str, Any]


def prepare(request: Request) -> Prepared:
    """Check a new run from its flags to its data.

    Raises:
        Refused: it cannot be run as asked for.
    """
    task, config = resolve(request)
    ranks = request.ranks
    device = pick_device(config, ranks, 0)
    config.device = "cuda" if device.type == "cuda" else "cpu"  # a resume must not find another one without a word
    found = gpus.seen_here() if device.type == "cuda" else []
    cards.check(found)
    precision = Precision(config.precision, device)
    everywhere = ranks * request.nodes[-1]
    check_ranks(config, ranks, request.nodes, device)
    wandb.check(config.log.wandb)
    is_searched = config.micro_batch_size == "auto"
    chosen = [name for name in ("micro_batch_size", "cpu_threads") if getattr(config, name) in (None, "auto")]
    _cut_batch(config, everywhere)
    train_set, eval_set = build.make_datasets(task, config)
    check_best(config, task, eval_set)
    sizes = _micro_batch_sizes(config, device, everywhere, len(train_set)) if is_searched else []
    if not sizes:
        check_sync_batchnorm(config, device, everywhere, len(train_set))
    if config.data.workers is None:
        config.data.workers = cpu.loaders(ranks, device, is_indexed_at_once(train_set, task.collate))
    model = checked_model(task, config, everywhere, precision)
    with _without_compiler():
        make_optimizer(task, model, config)
    reason = micro_reason = ""
    if is_searched:
        from train.runs import batch_size

        flat = configuration.to_flat(config)
        if config.parallel.shard_size is not None:  # a try has the ranks of this machine alone
            flat["parallel.shard_size"] = math.gcd(config.parallel.shard_size, ranks)
        config.micro_batch_size, micro_reason = batch_size.find(request.task, request.copy, flat, ranks, sizes)
    if config.cpu_threads is None:
        config.cpu_threads, reason = cpu.threads(ranks, device, model)
    files: dict[str, str | bytes] = {}
    if request.init is not None:
        from safetensors.torch import save

        build.set_weights(model, build.read_weights(Path(request.init)), request.init)
        files["init.safetensors"] = save({name: t.contiguous().clone() for name, t in model.state_dict().items()})
    files["config.toml"] = configuration.to_toml(config)
    if not task.is_built_in:
        files["task.py"] = task.file.read_bytes()
    data = build.fingerprint(task, config, train_set, eval_set)
    files[fingerprint.FACTS] = json.dumps(data, indent=1) + "\n"
    plan = build.plan_of(config, len(train_set))
    source = None if task.is_built_in else Path(request.task).absolute()
    record = {
        "task": task.name if task.is_built_in else "task.py",
        "task_source": str(source) if source else None,
        "task_imports": imports.digests(task.file, source.parent) if source else {},
        "task_sha256": task.sha256,
        "cwd": os.getcwd(),
        "world_size": everywhere,
        "chosen": chosen,
        "total_steps": build.total_steps(config, plan),
        "steps_per_epoch": plan.steps_per_epoch,
        "samples": len(train_set),
        "cpu_threads_reason": reason,
        "micro_batch_size_reason": micro_reason,
        "versions": versions(found),
        "git_revision": _git_revision(),
    }
    return Prepared(task, config, files, record)


def _cut_batch(config: Config, ranks: int) -> None:
    """Give the micro batch its size, where none is given.

    Raises:
        Refused: the one that is given leaves a rank without work.
    """
    if not isinstance(config.micro_batch_size, int):
        # rounded up as the smallest number of forwards; rounded down where that would leave a rank without work
        size = -(-config.batch_size // ranks)
        config.micro_batch_size = size if -(-config.batch_size // size) >= ranks else config.batch_size // ranks
    check_micro_batches(config, ranks)


def checked_model(task: Task, config: Config, ranks: int, precision: Precision) -> torch.nn.Module:
    """The model, which so many ranks can train, spread and compute again as `parallel` says.

    Raises:
        Refused: it cannot.
    """
    model = build.make_model(task, config, precision.weights)
    build.check_forward(task, model)
    choose.check_model(model, ranks, precision.device)
    if choose.shards(config, ranks):
        from train.parallel import fsdp

        fsdp.check(model, config.parallel.wrap)
    recompute(model, config.parallel.recompute)
    return model


@contextlib.contextmanager
def _without_compiler() -> Iterator[None]:
    """Making an optimizer loads torch's compiler, which takes longer than all else here and compiles nothing.

    Its method is marked as torch marks it when the compiler is loaded (torch/_compile.py, `_disable_dynamo`); with a
    torch that does it otherwise, this does nothing.
    """
    method = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", None)
    if method is None or hasattr(method, "__dynamo_disable"):
        yield
        return
    setattr(method, "__dynamo_disable", method)
    try:
        yield
    finally:
        delattr(method, "__dynamo_disable")


def check_ranks(config: Config, local: int, nodes: range, device: torch.device) -> None:
    """Whether a run can be spread as `parallel` says on any of these numbers of machines, a sample for every rank.

    Args:
        local: ranks of each machine.
        nodes: numbers of machines.

    Raises:
        Refused: it cannot.
    """
    for count in nodes:
        choose.check(config, count * local, device)
    ranks = nodes[-1] * local
    if config.batch_size < ranks:
        raise Refused(
            f"--batch_size {config.batch_size} is smaller than the number of ranks {ranks}; "
            f"use at least {ranks}, or fewer ranks"
        )


def check_best(config: Config, task: Task, eval_set: Any, known: Iterable[str] = ()) -> None:
    """Whether evaluations can say which checkpoint is the best, as far as that is known.

    Args:
        known: the figures of the run's evaluations; none before there was one.

    Raises:
        Refused: they cannot, so that no checkpoint would be kept for it.
    """
    text = config.checkpoint.best
    if not text:
        return
    metric = best.aim_of(text).metric
    if eval_set is None:
        raise Refused(
            f"--checkpoint.best {text} needs evaluations, and datasets() in {task.file} returns None for the "
            "evaluation set; leave it out"
        )
    if metric != "loss" and task.metrics is None:
        raise Refused(
            f"--checkpoint.best {text}: {task.file} has no function metrics, so an evaluation gives the loss alone; "
            "use --checkpoint.best loss"
        )
    if not metric or (known and metric not in known):
        names = nearest(metric, known, f"; there are: {', '.join(known) or 'loss and the names that metrics() gives'}")
        raise Refused(f"--checkpoint.best {text}: no evaluation gives {metric or 'a figure without a name'}{names}")


def check_micro_batches(config: Config, ranks: int) -> None:
    """Whether every rank has work; a size that is to be found will see to that.

    Raises:
        Refused: it has not.
    """
    if not isinstance(config.micro_batch_size, int):
        return
    micros = -(-config.batch_size // config.micro_batch_size)
    if micros < ranks:
        raise Refused(
            f"{ranks} ranks have only {micros} micro batches of {config.micro_batch_size} in a global batch of "
            f"{config.batch_size}; use --micro_batch_size {config.batch_size // ranks} or less"
        )


def _micro_batch_sizes(config: Config, device: torch.device, ranks: int, length: int) -> list[int]:
    """The configured size and its halves down to 1, as far as sync_batchnorm can have them."""
    assert isinstance(config.micro_batch_size, int)
    sizes = [config.micro_batch_size]
    while sizes[-1] > 1:
        sizes.append(sizes[-1] // 2)
    found = []
    for size in sizes:
        with contextlib.suppress(Refused):
            check_sync_batchnorm(dataclasses.replace(config, micro_batch_size=size), device, ranks, length)
            found.append(size)
    return found


def check_sync_batchnorm(config: Config, device: torch.device, ranks: int, length: int) -> None:
    if not config.sync_batchnorm:
        return
    if device.type == "cpu":
        raise Refused("sync_batchnorm needs GPUs: torch has none for CPUs; leave it out")
    if config.data.leaves_out and ranks > 1:
        raise Refused(
            f"sync_batchnorm waits for a micro batch of every rank, and --data.on_error {config.data.on_error} may "
            "leave one without any; leave out one of them"
        )
    assert isinstance(config.micro_batch_size, int)
    share, rest = config.micro_batch_size * ranks, length % config.batch_size
    if config.batch_size % share or (rest % share and not config.data.drop_last):
        raise Refused(
            f"sync_batchnorm needs every global batch to divide evenly among the ranks: batch_size "
            f"{config.batch_size} and the rest of an epoch, {rest}, must be multiples of "
            f"micro_batch_size x ranks = {share}; --data.drop_last true leaves out the rest"
        )


def versions(found: Sequence[gpus.Card] = ()) -> dict[str, str]:
    """What computes: recorded with the run.

    Args:
        found: the GPUs; asking torch for a name would open one in this process.
    """
    return {
        "train": train.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "gpu": found[0].name if found else "none",
    }


def _git_revision() -> str | None:
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None

"""Checks a run completely before anything is created or changed.

`prepare` checks a new run. A resume (resume.py) and a fork (fork.py) call `check_run` too.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from .. import config as configuration
from .. import doing, gpus
from ..build import cores, initial_weights, objects, sampling, schedule
from ..build.objects import make_objects
from ..build.reads import recording
from ..build.updates import read_updates
from ..config import Config, decays, strategies
from ..data import fingerprint, probe, threads
from ..data.fetch import EVALUATION, TRAINING, is_indexed_at_once
from ..data.progress import set_total
from ..errors import Refused, nearest
from ..parallel import choose
from ..parallel.devices import check_fork, check_kernels, pick_device
from ..parallel.precision import Precision, auto, lacks_tf32
from ..parallel.torch_private import without_compiler
from ..parallel.wrap_units import recompute, wrapped
from ..run import best
from ..tasks import Task
from ..trainer import trace
from ..trainer.loggers import wandb
from . import batch_norm, deterministic, first_look, frozen_modes, kept_split, provenance, unused_fields
from .request import ALONE, Plan, Request, resolve, scratch_run_dir
from .task_source import kept, of_task, unused_warning
from .unused_fields import asked, of_no_use

_METRICS = ("checkpoint.best", "early_stopping.metric", "schedule.metric")
"""Fields that name a metric of the evaluations."""


@dataclasses.dataclass
class Checked:
    """What the checks found out."""

    precision: Precision
    """Also holds the device of the first rank."""
    cards: list[gpus.Card]
    """GPUs that this process sees; empty on the CPU."""
    train_set: Any
    eval_sets: dict[str, Any]
    samples: int
    """Number of samples of an epoch; with `overfit`, of the training set."""
    total: int
    """Steps of the whole run."""
    threads: str
    """Why data workers cannot be forked after `datasets()`; '' if they can."""
    warnings: list[str]


@scratch_run_dir()
def prepare(
    request: Request, *, ranks: int = 1, nodes: range = ALONE, runs: Path = Path(),
    elsewhere: Callable[[], list[list[gpus.Card]]] = list,
) -> Plan:  # fmt: skip
    """Check a new run from its flags to its data, and choose the values that its user left open.

    Args:
        ranks: Number of ranks on each machine.
        nodes: Possible numbers of machines.
        runs: The folder of the runs.
        elsewhere: Under torchrun: returns the GPUs of each other rank's machine; an empty list: unknown.

    Raises:
        Refused: the run is not possible as requested.
    """
    task, config = resolve(request)
    task, warnings = overfitted(task, config, request.flags)
    everywhere = ranks * nodes[-1]
    chosen = [name for name in ("micro_batch_size", "cpu_threads") if getattr(config, name) in (None, "auto")]
    is_searched = config.micro_batch_size == "auto"
    if is_searched and config.data.on_device:
        raise Refused("--micro_batch_size auto leaves no GPU memory for --data.on_device true; give a number")
    cut_batch(config, ranks, nodes)
    beside = Path(request.task).absolute().parent
    source = of_task(task.file, beside)
    if not task.is_built_in:
        warnings += unused_warning(source, Path(request.task))
    precision_reason = choose_precision(config, ranks, elsewhere)
    set_here = asked(request.flags, request.config_file, task)
    with recording(config) as seen:
        found = check_run(task, config, ranks, everywhere, set_here)
        warnings += found.warnings
        model, device = check_model(task, config, everywhere, found.precision), found.precision.device
        initial = initial_weights.fitted(task, config, model)
        data = objects.fingerprint(task, config, train_set=found.train_set, eval_sets=found.eval_sets)

    def reads(field: str) -> bool:
        return seen.has(field) or source.reads(field)

    unused_fields.check_read(task, config, reads, set_here)
    if config.data.workers is None:
        config.data.workers = cores.default_loaders(ranks, device, is_indexed_at_once(found.train_set, task.collate))
    if config.data.workers and found.threads:
        raise Refused(found.threads)
    micro_reason = threads_reason = ""
    if is_searched:
        from . import batch_size

        with doing.now("the search for a micro batch size"):
            config.micro_batch_size, micro_reason = batch_size.find(request, config, ranks)
        check_sync_batchnorm(config, device, everywhere, objects.plan_of(config, found.samples).length)
    if config.cpu_threads is None:
        config.cpu_threads, threads_reason = cores.default_threads(ranks, device, model)
    files, code = kept(task, Path(request.task), config.data.root)
    record = _record(task, objects.plan_of(config, found.samples).length, found.total) | {
        **code,
        "world_size": everywhere,
        "chosen": chosen,
        "cpu_threads_reason": threads_reason,
        "micro_batch_size_reason": micro_reason,
        "precision_reason": precision_reason,
        "versions": provenance.versions(found.cards),
        "init": initial.table() if initial is not None else [],
        "warnings": warnings,
        "unused_fields": of_no_use(task, config, reads),
    }
    record["not_exact"] = not_exact(task, config, found)
    files |= {fingerprint.FACTS: json.dumps(data, indent=1) + "\n", "config.toml": configuration.to_toml(config)}
    if initial is not None:
        files[initial_weights.FILE] = initial.file()
    warnings += [*_of_hidden(fingerprint.hidden_in(data)), *(f"not exact: {line}" for line in record["not_exact"])]
    warnings += _of_ordered(config, chosen) + frozen_modes.warnings(task, model, config.freeze)
    warnings += first_look.warnings(
        task, config, model=model, eval_sets=found.eval_sets, ranks=everywhere, device=device,
        named=followed_metrics(config),
    )  # fmt: skip
    if initial is not None and initial.path:
        sets = {"train_set": found.train_set, "eval_sets": found.eval_sets}
        warnings += kept_split.warnings(task, config, initial.path, runs, sets=sets)
    batch_norm.check(
        task, config, found.train_set, lambda: model, samples=found.samples, ranks=everywhere, steps=range(found.total)
    )
    deterministic.check(task, config, device, found.train_set, model)  # last: it takes the model's values
    return Plan(files=files, record=record, warnings=warnings, ranks=ranks, task=task, config=config)


def overfitted(task: Task, config: Config, typed: Collection[str]) -> tuple[Task, list[str]]:
    """Return the task as `overfit` trains it, and warnings: overfit chooses the samples and keeps the learning rate.

    Args:
        typed: The fields that the user has typed. They win over overfit.
    """
    if config.overfit is None:
        return task, []
    warnings, schedule = [], config.schedule
    if task.sampler:
        warnings.append(
            f"--overfit {config.overfit} chooses the samples, so {task.sampler}() in {task.file} is not called"
        )
    keeps = f"--overfit {config.overfit} keeps the learning rate constant"
    if task.schedule is not None:
        warnings.append(f"{keeps}, so schedule() in {task.file} is not called")
    for name, value in {"decay": decays.CONSTANT, "warmup_epochs": 0.0}.items():
        field, set_to = f"schedule.{name}", getattr(schedule, name)
        if field in typed or set_to == value:
            continue
        if set_to != configuration.fields()[field].default and task.schedule is None:
            warnings.append(f"{keeps}, so {field} is {value}; to change: --{field} {set_to}")
        setattr(schedule, name, value)
    return task.to_overfit(), warnings


def _of_ordered(config: Config, chosen: list[str]) -> list[str]:
    """Return a warning if the bits of an `ordered` run depend on its number of ranks, by values that are not set."""
    if config.parallel.reduce != "ordered" or not chosen:
        return []
    flat = configuration.to_flat(config)
    values, flags = (
        form.join(f"{prefix}{name} {flat[name]}" for name in chosen) for form, prefix in ((", ", ""), (" ", "--"))
    )
    return [
        f"--parallel.reduce ordered gives the same bits on other numbers of ranks only with the same {values}, whose "
        f"default depends on the ranks; to launch it there: {flags}"
    ]


def _of_hidden(names: list[str]) -> list[str]:
    """Return a warning about hidden files that a task's own reader takes for data."""
    if not names:
        return []
    which = f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}"
    return [f"the data contain hidden files ({which}), which may shift labels; delete them or skip them in datasets()"]


def check_run(
    task: Task,
    config: Config,
    local: int,
    ranks: int,
    asked: Mapping[str, str],
    *,
    count: Callable[[Any], int] | None = None,
) -> Checked:
    """Make the checks that every run needs, in order. Writes the device into `config`.

    Args:
        local: Number of ranks on each machine.
        ranks: Number of ranks on all machines, at most.
        asked: The fields that the user has set.
        count: Returns `samples` of the result, given the training set. None: as the task's functions say.

    Raises:
        Refused: the run is not possible as requested.
    """
    device = pick_device(config, local, 0)
    config.device = "cuda" if device.type == "cuda" else "cpu"  # a resume must not change the device silently
    cards = []
    if device.type == "cuda":
        check_fork()
        cards = gpus.seen_here()
    check_kernels(cards)
    warnings = without_tf32(config, device, local, asked)
    precision = Precision(config.precision, device)
    unused_fields.check(task, config, asked)
    wandb.check(config.log.wandb)
    followed = followed_metrics(config)
    if followed and not (config.eval.every_epochs or config.eval.every_steps):
        raise Refused(f"--{next(iter(followed))} needs evaluations before the end; give --eval.every_epochs")
    if config.on_nan == "skip" and config.precision == "fp16":
        raise Refused("--on_nan skip is not needed: the loss scaling of fp16 skips such steps; leave out --on_nan")
    train_set, eval_sets = objects.make_datasets(task, config)
    problem = threads.problem() if config.data.workers != 0 else ""  # ranks fork data workers now, before model()
    if config.data.workers and problem:
        raise Refused(problem)
    unused_fields.check_evaluation(task, config, eval_sets, asked)
    if eval_sets and not task.can_evaluate:
        raise Refused(
            f"{task.file} has updates() and an evaluation set, but nothing to evaluate; define metrics(model, batch), "
            "or return None for the evaluation set in datasets()"
        )
    for field in metrics_of(config):
        check_metric(field, config, task, eval_sets)
    samples = count(train_set) if count is not None else sampling.first_samples(task, config, len(train_set))
    plan = objects.plan_of(config, samples)
    check_sync_batchnorm(config, device, ranks, plan.length)
    total = objects.total_steps(config, plan)
    set_total(total)
    schedule.check(task, schedule.Planned(config, plan.steps_per_epoch, total))
    trace.steps_of(config.trace, total=total)
    return Checked(
        precision=precision, cards=cards, train_set=train_set, eval_sets=eval_sets, samples=samples, total=total,
        threads=problem, warnings=warnings,
    )  # fmt: skip


def choose_precision(config: Config, ranks: int, elsewhere: Callable[[], list[list[gpus.Card]]]) -> str:
    """Write the precision that `auto` stands for into a new run's configuration. Returns a line about it, or ''."""
    if config.precision != "auto":
        return ""
    device = pick_device(config, ranks, 0)
    known = [gpus.of_ranks(ranks), *elsewhere()] if device.type == "cuda" else []
    cards = [card for found in known for card in found] if all(known) else []
    config.precision, reason = auto(device, cards)  # type: ignore[assignment]
    return reason


def without_tf32(config: Config, device: torch.device, local: int, asked: Mapping[str, str]) -> list[str]:
    """Return a warning if a run of tf32 gets devices that do not have it: a resume on a CPU, for example.

    Args:
        local: Number of ranks on this machine.

    Raises:
        Refused: the user asks for tf32 now.
    """
    if config.precision != "tf32":
        return []
    lacks = lacks_tf32(device, gpus.of_ranks(local) if device.type == "cuda" else [])
    if lacks and "precision" in asked:
        raise Refused(f"precision tf32 needs {lacks}; use --precision fp32")
    return [f"precision tf32 needs {lacks}, so this run computes in fp32 here"] if lacks else []


def not_exact(task: Task, config: Config, found: Checked) -> list[str]:
    """Return the reasons why a run would not be exact, as far as its first samples show."""
    assert isinstance(config.micro_batch_size, int)
    sets = {TRAINING: found.train_set} | {name or EVALUATION: one for name, one in found.eval_sets.items()}
    return probe.why_not_exact(
        sets, collate=task.collate, made_by=task.datasets, batch=config.micro_batch_size, seed=config.seed
    )


def _record(task: Task, samples: int, total: int) -> dict[str, Any]:
    """Return the fields of run.json about a new run's data and versions."""
    return {
        "cwd": os.getcwd(),
        "total_steps": total,
        "samples": samples,
        "sampler": task.sampler,
        "git_revision": provenance.git_revision(),
    }


def cut_batch(config: Config, local: int, nodes: range) -> None:
    """Choose the size of a new run's micro batches, unless it is given.

    Args:
        local, nodes: as in `check_ranks`.

    Raises:
        Refused: as `check_ranks`, or the given size leaves a rank without work.
    """
    check_ranks(config, local, nodes)
    ranks = local * nodes[-1]
    if not isinstance(config.micro_batch_size, int):
        # rounded up for the smallest number of forward passes, but down if that would leave a rank without work
        size = -(-config.batch_size // ranks)
        config.micro_batch_size = size if -(-config.batch_size // size) >= ranks else config.batch_size // ranks
    micros = -(-config.batch_size // config.micro_batch_size)
    if micros < ranks:
        raise Refused(
            f"a global batch of {config.batch_size} has only {micros} micro batches of {config.micro_batch_size} for "
            f"{ranks} ranks; use --micro_batch_size {config.batch_size // ranks} or less"
        )


def check_model(task: Task, config: Config, ranks: int, precision: Precision) -> torch.nn.Module:
    """Return the model, after checking that this many ranks can train it with the `parallel` settings.

    The checks include sharding, recomputation and the optimizer.

    Raises:
        Refused: they cannot.
    """
    model = objects.make_model(task, config, precision.weights)
    objects.check_forward(task, model)
    if task.inference_model is not None and strategies.of(config.parallel.strategy, ranks).splits_parameters:
        how = config.parallel.strategy
        raise Refused(f"{how} cannot run inference_model() of {task.file}; remove it, or use ddp")
    choose.check_model(model, config=config, size=ranks, device=precision.device)
    objects.inference_model(task, model)
    if config.compile == "blocks":
        wrapped(model, config)
    recompute(model, config.parallel.recompute)
    with without_compiler():
        read_updates(task, model, config)
    make_objects(task, model, config=config, device=torch.device("cpu"))
    return model


def check_ranks(config: Config, local: int, nodes: range) -> None:
    """Check that the `parallel` settings work on each of these numbers of machines, with a sample for every rank.

    Args:
        local: Number of ranks on each machine.
        nodes: Possible numbers of machines.

    Raises:
        Refused: they do not.
    """
    for count in nodes:
        choose.check(config, count * local)
    ranks = nodes[-1] * local
    if config.batch_size < ranks:
        raise Refused(
            f"--batch_size {config.batch_size} is smaller than the number of ranks, {ranks}; "
            f"use at least {ranks}, or fewer ranks"
        )


def metrics_of(config: Config) -> list[str]:
    """Return the fields in use that name a metric of the evaluations."""
    flat = configuration.to_flat(config)
    has_use = {"schedule.metric": decays.of(config.schedule.decay).follows_evaluations}
    return [field for field in _METRICS if flat[field] and has_use.get(field, True)]


def followed_metrics(config: Config) -> dict[str, str]:
    """Map those of `metrics_of` without whose metric a run fails to their text."""
    flat = configuration.to_flat(config)
    return {field: flat[field] for field in metrics_of(config) if field != "checkpoint.best"}


def check_metric(
    field: str, config: Config, task: Task, eval_sets: Collection[str], known: Collection[str] = ()
) -> None:
    """Check that evaluations give the metric that a field names, as far as that is known.

    Args:
        field: One of `metrics_of`.
        known: Metrics of the run's evaluations so far; empty before the first evaluation.

    Raises:
        Refused: they do not.
    """
    text = configuration.to_flat(config)[field]
    metric = best.aim_of(text).metric
    if not eval_sets:
        why = f"datasets() in {task.file} returns None for the evaluation set"
        raise Refused(f"--{field} {text} needs evaluations, but {why}; leave out --{field}")
    weights = ("", "ema.") if config.ema.decay is not None else ("",)
    prefixes = [which + (f"{name}." if name else "") for which in weights for name in eval_sets]
    is_open = not known and (task.metrics is not None or task.compute_metrics is not None)
    if is_open and metric and any(map(metric.startswith, prefixes)):
        return  # only the first evaluation shows which names exist
    if not known and task.loss is not None and any(metric.startswith(f"{prefix}loss.") for prefix in prefixes):
        return  # a part of the loss
    known = known or [f"{prefix}loss" for prefix in prefixes if task.loss is not None]
    if metric not in known:
        likely = {prefix + metric.rpartition(".")[2] for prefix in prefixes if is_open and metric}
        names = nearest(metric, likely.union(known), otherwise=f"; there are: {', '.join(known)}")
        raise Refused(f"--{field} {text}: no evaluation gives {metric or 'a metric without a name'}{names}")


def check_sync_batchnorm(config: Config, device: torch.device, ranks: int, length: int) -> None:
    if not config.sync_batchnorm:
        return
    if device.type == "cpu":
        raise Refused("sync_batchnorm works only on GPUs; leave it out")
    assert isinstance(config.micro_batch_size, int)
    share, rest = config.micro_batch_size * ranks, length % config.batch_size
    if config.batch_size % share or (rest % share and not config.data.drop_last):
        raise Refused(
            f"sync_batchnorm needs batch_size ({config.batch_size}) and the last batch of an epoch ({rest}) to be "
            f"multiples of micro_batch_size x ranks = {share}; change one, or drop the last batch: "
            "--data.drop_last true"
        )

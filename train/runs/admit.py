"""Everything that can be wrong with a run is found here, before anything is created."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import train
from train import config as configuration
from train.config import Config
from train.engine import build, threads
from train.engine.opened import config_of, data_differs, task_of
from train.errors import Refused
from train.parallel import choose
from train.parallel.precision import Precision
from train.parallel.units import recompute
from train.parallel.world import pick_device
from train.record import manifest as manifests
from train.record.store import Run
from train.tasks import Task, load


@dataclasses.dataclass
class Request:
    """What the user asked for, as text: it travels from `train launch` to the process that imports torch."""

    task: str
    flags: dict[str, str]
    config_file: str | None = None
    init: str | None = None
    ranks: int = 1


@dataclasses.dataclass
class Prepared:
    """A run that has passed every check: what to create its folder with."""

    task: Task
    config: Config
    files: dict[str, str | bytes]
    record: dict[str, Any]


def resolve(request: Request) -> tuple[Task, Config]:
    """The task and the configuration that defaults, file and flags make.

    Raises:
        Refused: something in them is unknown or wrong.
    """
    task = load(request.task)
    fields = configuration.fields()
    own = {f"task.{name}": hint for name, hint in _settings_types(task).items()}
    flat: dict[str, Any] = {"epochs": fields["epochs"].default}
    flat = configuration.layer(dict(task.DEFAULTS), task.Settings, f"DEFAULTS in {task.file}: ", flat)
    configuration.build(flat, task.Settings, f"{task.file}: ", partial=True)
    if request.config_file is not None:
        source = f"{request.config_file}: "
        tree = configuration.flatten(configuration.read_toml(Path(request.config_file)), source)
        # checked alone first, so that a message names the file and not the flags over it
        alone = configuration.layer(tree, task.Settings, source, flat)
        configuration.build(alone, task.Settings, source, partial=True)
        flat = alone
    flat = configuration.layer(_parsed(request.flags, own, task), task.Settings, "", flat)
    config = configuration.build(flat, task.Settings)
    if config.data.root:
        config.data.root = str(Path(config.data.root).absolute())
    return task, config


def _settings_types(task: Task) -> dict[str, Any]:
    import typing

    if task.Settings is None:
        return {}
    try:
        hints = typing.get_type_hints(task.Settings, include_extras=True)
    except NameError as error:
        raise Refused(f"Settings in {task.file}: {error}") from None
    return {field.name: hints[field.name] for field in dataclasses.fields(task.Settings)}


def _parsed(flags: dict[str, str], own: dict[str, Any], task: Task) -> dict[str, Any]:
    known = {name: info.annotation for name, info in configuration.fields().items()} | own
    for name in flags:
        if name not in known:
            from train.errors import nearest

            hint = nearest(name, known, f"; the settings of this task: {', '.join(own)}" if own else "")
            raise Refused(f"unknown field --{name}{hint or '; this task has no settings of its own'}")
    return {name: configuration.parse_value(name, known[name], text) for name, text in flags.items()}


def prepare(request: Request) -> Prepared:
    """Check a new run from its flags to its data.

    Raises:
        Refused: it cannot be run as asked for.
    """
    task, config = resolve(request)
    ranks = request.ranks
    device = pick_device(config, ranks, 0)
    precision = Precision(config.precision, device)
    _check_ranks(config, ranks, device)
    if config.micro_batch_size is None:
        # rounded up as the smallest number of forwards; rounded down where that would leave a rank without work
        size = -(-config.batch_size // ranks)
        config.micro_batch_size = size if -(-config.batch_size // size) >= ranks else config.batch_size // ranks
    if -(-config.batch_size // config.micro_batch_size) < ranks:
        raise Refused(
            f"{ranks} ranks have only {-(-config.batch_size // config.micro_batch_size)} micro batches of "
            f"{config.micro_batch_size} in a global batch of {config.batch_size}; "
            f"use --micro_batch_size {config.batch_size // ranks} or less"
        )
    if config.cpu_threads is None:
        torch.set_num_threads(1)  # or the process that measures would inherit a pool of threads without the threads
    train_set, eval_set = build.make_datasets(task, config)
    _check_sync_batchnorm(config, device, ranks, len(train_set))
    model = build.make_model(task, config, precision.weights)
    if choose.resolve(config, ranks) in ("fsdp", "hsdp"):
        from train.parallel import fsdp

        fsdp.check(model, config.parallel.wrap)
    recompute(model, config.parallel.recompute)
    with _without_compiler():
        build.make_optimizer(task, model, config)
    reason = ""
    if config.cpu_threads is None:
        rehearse = functools.partial(_rehearsal, task, config, precision, train_set, model)
        config.cpu_threads, reason = threads.choose(ranks, device, rehearse)
    files: dict[str, str | bytes] = {}
    if request.init is not None:
        from safetensors.torch import save

        build.set_weights(model, build.read_weights(Path(request.init)), request.init)
        files["init.safetensors"] = save({name: t.contiguous().clone() for name, t in model.state_dict().items()})
    files["config.toml"] = configuration.to_toml(config)
    if not task.is_built_in:
        files["task.py"] = task.file.read_bytes()
    files |= build.fingerprint(task, config, train_set, eval_set).files()
    plan = build.plan_of(config, len(train_set))
    record = {
        "task": task.name if task.is_built_in else "task.py",
        "task_source": None if task.is_built_in else str(task.file),
        "task_sha256": task.sha256,
        "cwd": os.getcwd(),
        "world_size": ranks,
        "total_steps": build.total_steps(config, plan),
        "steps_per_epoch": plan.steps_per_epoch,
        "samples": len(train_set),
        "cpu_threads_reason": reason,
        "versions": versions(),
        "git_revision": _git_revision(),
    }
    return Prepared(task, config, files, record)


def _rehearsal(task: Task, config: Config, precision: Precision, train_set: Any, model: Any) -> Callable[[], None]:
    """The forward and backward of a micro batch on the CPU, to be measured. It changes model and random state."""
    import numpy as np

    from train.data.fetch import fetcher
    from train.data.loader import to_device
    from train.data.plan import MicroBatch

    indices = np.arange(min(config.micro_batch_size or 1, len(train_set)))
    batch = fetcher(train_set, task.collate)(MicroBatch(0, 0, indices, config.seed))
    batch = to_device(batch, torch.device("cpu"), precision.inputs)
    model.train()

    def step() -> None:
        with precision.autocast():
            value = task.loss(model, batch)
        torch.autograd.backward(value[0] if isinstance(value, tuple) else value)

    return step


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


def _check_ranks(config: Config, ranks: int, device: torch.device) -> None:
    choose.check(config, ranks, device)
    if config.batch_size < ranks:
        raise Refused(
            f"--batch_size {config.batch_size} is smaller than the number of ranks {ranks}; "
            f"use at least {ranks}, or fewer ranks"
        )


def _check_sync_batchnorm(config: Config, device: torch.device, ranks: int, length: int) -> None:
    if not config.sync_batchnorm:
        return
    if device.type == "cpu":
        raise Refused("sync_batchnorm needs GPUs: torch has none for CPUs; leave it out")
    assert config.micro_batch_size is not None
    share, rest = config.micro_batch_size * ranks, length % config.batch_size
    if config.batch_size % share or (rest % share and not config.data.drop_last):
        raise Refused(
            f"sync_batchnorm needs every global batch to divide evenly among the ranks: batch_size "
            f"{config.batch_size} and the rest of an epoch, {rest}, must be multiples of "
            f"micro_batch_size x ranks = {share}; --data.drop_last true leaves out the rest"
        )


def prepare_resume(run: Run, flags: dict[str, str], ranks: int) -> tuple[Task, Config, list[str]]:
    """Check that a run can go on, with these changes; nothing is written. Also returns warnings.

    Raises:
        Refused: it cannot go on as it stands or as asked for.
    """
    record, task = run.read(), task_of(run)
    config = config_of(run, task)
    before = configuration.to_flat(config)
    own = {f"task.{name}": hint for name, hint in _settings_types(task).items()}
    changes = _parsed(flags, own, task)
    if changes:
        flat = configuration.layer(changes, task.Settings, "", before)
        config = configuration.build(flat, task.Settings)
        if config.data.root:
            config.data.root = str(Path(config.data.root).absolute())
        _check_changes(before, configuration.to_flat(config), f"cannot change {run.name}")
    found = manifests.newest_valid(run)
    warnings: list[str] = list(found[2]) if found else []
    step, manifest = (found[0], found[1]) if found else (0, {})
    if manifest:
        _check_changes(
            manifest["config"],
            configuration.to_flat(config),
            f"{run.folder / 'config.toml'} does not fit its checkpoints",
        )
        if manifest.get("task_sha256") != task.sha256:
            raise Refused(f"{task.file} is not the task that {run.name} was trained with; put the original back")
    device = pick_device(config, ranks, 0)
    Precision(config.precision, device)
    if config.micro_batch_size is None or config.cpu_threads is None:
        raise Refused(f"{run.folder / 'config.toml'} lacks micro_batch_size or cpu_threads; put them back")
    _check_ranks(config, ranks, device)
    train_set, eval_set = build.make_datasets(task, config)
    differs = data_differs(run, task, config, train_set, eval_set)
    if differs:
        raise Refused(
            f"the data differ from those that {run.name} began with: {differs}; put them back as they were, "
            "or start a new run"
        )
    if len(train_set) != record.get("samples", len(train_set)):
        raise Refused(
            f"the training set has {len(train_set)} samples now and had {record['samples']} when {run.name} "
            "was started; put the data back as it was"
        )
    _check_sync_batchnorm(config, device, ranks, len(train_set))
    plan = build.plan_of(config, len(train_set))
    total = build.total_steps(config, plan)
    if total < step:
        raise Refused(f"{run.name} has trained {step} steps already, more than the {total} now asked for")
    micros = plan.micro_batches(0)
    if micros < ranks:
        warnings.append(f"{ranks} ranks share {micros} micro batches per step: {ranks - micros} of them only wait")
    source = record.get("task_source")
    if source and Path(source).is_file():
        import hashlib

        if hashlib.sha256(Path(source).read_bytes()).hexdigest() != record.get("task_sha256"):
            warnings.append(f"{source} has changed since; {run.name} goes on with its own copy")
    return task, config, warnings


def apply_resume(run: Run, config: Config) -> None:
    """Write the changes of a resume into the run folder."""
    from train.record.store import write_atomically

    write_atomically(run.folder / "config.toml", configuration.to_toml(config))


def _check_changes(before: dict[str, Any], after: dict[str, Any], what: str) -> None:
    forbidden = configuration.forbidden_changes(before, after)
    if forbidden:
        name = forbidden[0]
        raise Refused(
            f"{what}: {name} was {before.get(name)} and is {after.get(name)} now; put it back, or start a new run "
            f"(a resume may change {configuration.changeable()})"
        )


def versions() -> dict[str, str]:
    """What computed: recorded with the run."""
    return {
        "train": train.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
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

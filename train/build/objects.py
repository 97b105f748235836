"""From a run folder to its task, configuration, datasets and model: the same on every rank and in every attempt."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from .. import config as configuration
from .. import doing
from ..checkpoint.extra import Extra
from ..code import copies
from ..config import Config
from ..data import fingerprint as fingerprints
from ..data.fetch import EVALUATION, TRAINING, BadSample, fetcher, is_indexed_at_once
from ..data.loader import Loader
from ..data.order import seed_of
from ..data.plan import MicroBatch, Plan
from ..data.progress import set_progress, set_total
from ..data.seeding import seed_host
from ..data.to_device import prepared
from ..errors import Refused, TrainingFailed, one_line
from ..parallel.precision import Precision
from ..parallel.torch_private import buffers_of
from ..run.owner import TrustedRun
from ..run.ownership import MODULES
from ..run.run_folder import Run
from ..run.spec import Spec
from ..tasks import Task, load, where
from . import determinism, reads
from .freeze import freeze

T = TypeVar("T")
_NAMED = 3
"""Maximum number of differences of the data that are named."""


def task_of(run: Run, spec: Spec) -> Task:
    """Return the task of a run: the built-in one, or the copy in the run folder, which imports the copies of its
    modules. It finds the run folder in TRAIN_RUN_DIR.

    Raises:
        Refused: the copy is gone or broken, or another user's.
    """
    run = TrustedRun(run)
    if not spec.task:
        raise Refused(f"{run.path / 'run.json'} names no task; put it back")
    os.environ["TRAIN_RUN_DIR"] = str(run.path)  # for the task's own files, in data workers too
    os.environ["TRAIN_NAME"] = run.name
    task = _loaded(run, spec)
    return task if spec.config.get("overfit") is None else task.to_overfit()


def _loaded(run: TrustedRun, spec: Spec) -> Task:
    if spec.task != "task.py":
        return load(spec.task)
    if not (run.folder / "task.py").is_file():
        raise Refused(f"{run.path / 'task.py'} is missing; put the task's copy back")
    code = copies.of_run(run, spec)
    try:
        return load(
            "task.py",
            file=run.path / "task.py",
            beside=code.beside,
            source=run.code("task.py"),
            seen_as=code.seen_as,
        )
    except Refused as error:
        if not code.are_copies:
            raise
        modules = run.path / MODULES
        raise Refused(f"{error}; its modules come from {modules}: remove that file to use the originals") from None


def config_of(run: Run, task: Task) -> Config:
    """Return the resolved configuration in the run folder."""
    return configuration.from_toml(run.folder / "config.toml", task.Settings)


def make_datasets(task: Task, config: Config) -> tuple[Any, dict[str, Any]]:
    """Return the training set and the evaluation sets by name. Seeded, so that a random split is the same everywhere.

    A single set without a name has the name ''. With `overfit` each evaluation set is the training set.

    Raises:
        Refused: the task cannot make them, or they are not map-style datasets.
    """
    seed_host(seed_of(config.data.seed, "datasets"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # other numbers of threads sum in other orders, and a resume compares the bytes
    try:
        made = call(task, "datasets()", task.datasets, config)
    finally:
        torch.set_num_threads(threads)
    if not isinstance(made, (tuple, list)) or len(made) != 2:
        raise Refused(f"datasets in {task.file} must return (train, evaluation or None), got {type(made).__name__}")
    evaluations = _named(task, made[1])
    for part, dataset in ((TRAINING, made[0]), *((name or EVALUATION, each) for name, each in evaluations.items())):
        _check_set(task, config, part, dataset)
    length = config.overfit or len(made[0])  # a task's own order may have another: who knows it sets the steps again
    cut = Plan(length=length, batch_size=config.batch_size, micro_batch_size=1, drop_last=config.data.drop_last)
    set_total(total_steps(config, cut))
    if config.overfit is None:
        return made[0], evaluations
    return made[0], dict.fromkeys(evaluations or ([""] if task.can_evaluate else []), made[0])


def _check_set(task: Task, config: Config, part: str, dataset: Any) -> None:
    """Refuse a dataset that is not map-style, is empty, or cannot be kept on the device as asked."""
    by_index = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not by_index or isinstance(dataset, (IterableDataset, Mapping)):  # the first inherits a __getitem__ that raises
        raise Refused(
            f"the {part} set of {task.file} is a {type(dataset).__name__}; a map-style dataset is needed, "
            f"with __len__ and __getitem__{_instead_of(dataset)}"
        )
    if call(task, f"len() of the {part} set", len, dataset) == 0:
        raise Refused(f"the {part} set of {task.file} is empty; check --data.root and the task's settings")
    if not config.data.on_device:
        return
    if config.data.workers:
        raise Refused(
            "--data.on_device true keeps the data on the device, so data workers have no use; give --data.workers 0"
        )
    if not is_indexed_at_once(dataset, task.collate):
        raise Refused(
            f"--data.on_device true keeps only tensors, but the {part} set of {task.file} is a "
            f"{type(dataset).__name__}{' with collate()' if task.collate else ''}; return a "
            "torch.utils.data.TensorDataset, without collate()"
        )


def _named(task: Task, made: Any) -> dict[str, Any]:
    """Return the evaluation sets by name, from what datasets() returns as its second value."""
    if not isinstance(made, dict):
        return {} if made is None else {"": made}
    if not made:
        raise Refused(f"datasets in {task.file} returns an empty dict of evaluation sets; return None for none")
    for name in made:
        if not (isinstance(name, str) and name.isidentifier()) or name in ("ema", TRAINING):
            raise Refused(
                f"datasets in {task.file} names an evaluation set {name!r}; use letters, digits and _, but not "
                f"ema or {TRAINING} (metrics are named NAME.loss)"
            )
    return made


def _instead_of(dataset: Any) -> str:
    """Return the remedy for a wrong dataset, as the end of a sentence."""
    if isinstance(dataset, DataLoader):
        return ": return its dataset itself; --batch_size and --data.workers make the batches"
    if isinstance(dataset, Mapping):
        names = ", ".join(map(repr, itertools.islice(dataset, _NAMED)))
        return f": return its parts ({names}), (train, evaluation)"
    return (
        ": use train.shards(folder) for tar and parquet files, or datasets.load_dataset without "
        "streaming for one of the hub; read what else can only be read in order into a list"
    )


def fingerprint(task: Task, config: Config, *, train_set: Any, eval_sets: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fingerprint of a run's data: the task's own, or one of its datasets.

    Raises:
        Refused: the task's own fingerprint() fails, or returns what JSON cannot hold.
    """
    own = call(task, "fingerprint()", task.fingerprint, config) if task.fingerprint is not None else None
    if own is not None:
        call(task, "fingerprint()", json.dumps, own)
    root = config.data.root
    with refusing(task, "a look at the datasets"):
        return fingerprints.of_sets(root, own, train_set=train_set, eval_sets=eval_sets)


def data_differs(run: Run, task: Task, *, config: Config, train_set: Any, eval_sets: Mapping[str, Any]) -> str:
    """Return how these data differ from those that a run started with; '' if they do not, or if that is not known.

    Raises:
        Refused: the record of the first ones is damaged.
    """
    then = fingerprints.recorded(run.folder)
    if then is None:
        return ""
    found = fingerprints.differences(then, fingerprint(task, config, train_set=train_set, eval_sets=eval_sets))
    more = f"; and {len(found) - _NAMED} more differences" if len(found) > _NAMED else ""
    return one_line("; ".join(found[:_NAMED]) + more)


def make_model(task: Task, config: Config, weights: torch.dtype = torch.float32) -> nn.Module:
    """Return the model with its first weights, on the CPU. Seeded.

    Raises:
        Refused: the task cannot make it.
    """
    seed_host(seed_of(config.seed, "model"))
    model = call(task, "model()", task.model, config)
    if not isinstance(model, nn.Module):
        raise Refused(f"model in {task.file} must return a torch.nn.Module, got {type(model).__name__}")
    if any(name.rpartition(".")[2] == "_orig_mod" for name, _ in model.named_modules()):
        raise Refused(
            f"the model of {task.file} is wrapped by torch.compile, which renames its weights; use --compile "
            "true, or compile a module in place (net.compile())"
        )
    if any(map(nn.parameter.is_lazy, model.parameters())):
        raise Refused(
            f"the model of {task.file} has parameters without a shape yet (torch.nn.Lazy…): give their sizes, or call "
            "the model once in model()"
        )
    freeze(model, config.freeze)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise Refused(f"the model of {task.file} has no parameter to train")
    _give_memory(model)
    # not to(weights), which would turn complex numbers into real ones
    return model.double() if weights == torch.float64 else model


def make_objects(task: Task, model: nn.Module, *, config: Config, device: torch.device) -> dict[str, Any]:
    """Return the objects of the task's stateful(), with modules on the device. Seeded.

    Raises:
        Refused: stateful() does not return a dict of objects that can be saved and restored.
    """
    if task.stateful is None:
        return {}
    seed_host(seed_of(config.seed, "stateful"))
    made = call(task, "stateful()", task.stateful, model, config)
    if not isinstance(made, dict) or not all(isinstance(name, str) for name in made):
        raise Refused(f"stateful in {task.file} must return a dict from names to objects, got {type(made).__name__}")
    for name, one in made.items():
        if not (callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None))):
            raise Refused(
                f"stateful in {task.file}: {name} is a {type(one).__name__} without state_dict() and "
                "load_state_dict(); give it both, or keep what it holds in a buffer of the model"
            )
        if isinstance(one, nn.Module):
            one.to(device)
    Extra(objects=made).check(task.file, device)
    return made


def check_forward(task: Task, model: nn.Module) -> None:
    """Check that no module changes weights in its forward, as far as the modules show.

    Raises:
        Refused: it would.
    """
    for name, part in model.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None:
            raise Refused(
                f"{name or 'the model'} in {task.file} has max_norm, so each rank would change the weights "
                "differently; leave it out, or shorten rows after the optimizer's step (register_step_post_hook)"
            )


def inference_model(task: Task, model: nn.Module) -> nn.Module:
    """Return the model for evaluation and export: what the task's inference_model() returns, else the model itself."""
    if task.inference_model is None:
        return model
    seed_host(seed_of(0, "inference_model"))
    made = call(task, "inference_model()", task.inference_model, model)
    if not isinstance(made, nn.Module):
        raise Refused(f"inference_model in {task.file} must return a torch.nn.Module, got {type(made).__name__}")
    return made


def _give_memory(model: nn.Module) -> None:
    """Give each element of a buffer its own memory: a buffer that expand() made cannot be written to."""
    for part in model.modules():
        for name, buffer in buffers_of(part).items():
            if buffer is not None and buffer.layout == torch.strided:
                shape = zip(buffer.stride(), buffer.shape, strict=True)
                if any(step == 0 and size > 1 for step, size in shape):
                    buffers_of(part)[name] = buffer.contiguous()


def make_loader(
    task: Task, *, config: Config, precision: Precision, train_set: Any, eval_sets: Mapping[str, Any],
    workers: int, left_out: Callable[[Sequence[BadSample]], None],
) -> Loader:  # fmt: skip
    """Return the loader of a task's datasets. It forks, so it has to be made before other threads have work.

    Args:
        train_set: None: only evaluation sets are loaded.
        left_out: called with samples that cannot be read, if the config leaves them out. Otherwise they end the run.

    Raises:
        Refused: workers cannot open a file that is open here, or the task has started a thread.
    """
    return Loader(
        train_set,
        eval_sets,
        collate=task.collate,
        workers=workers,
        device=precision.device,
        dtype=precision.inputs,
        skipped=left_out if config.data.leaves_out else None,
        channels_last=config.channels_last,
        on_device=task.on_device,
        made_by=task.datasets,
        keeps=config.data.on_device,
    )


def first_samples(
    task: Task, config: Config, *, precision: Precision, dataset: Any, count: int = 0, name: str = TRAINING
) -> Any:
    """Return a batch of the first samples of a dataset. A small dataset is repeated.

    Args:
        count: how many; 0: a micro batch.
        name: of the dataset.
    """
    assert isinstance(config.micro_batch_size, int)
    fetch, wanted = fetcher(dataset, task.collate, name), count or config.micro_batch_size
    set_progress(0, 0)  # as in the first step

    def is_readable(index: int) -> bool:
        with contextlib.suppress(Exception):
            fetch(MicroBatch(step=0, number=0, indices=np.array([index]), seed=config.seed))
            return True
        return False

    found: Iterable[int] = range(len(dataset))
    if config.data.leaves_out:
        found = list(itertools.islice(filter(is_readable, found), wanted)) or found
    indices = np.resize(np.array(list(itertools.islice(found, wanted))), wanted)
    with doing.now(f"__getitem__() of the {name} set"):
        batch = fetch(MicroBatch(step=0, number=0, indices=indices, seed=config.seed))
    return prepared(
        batch,
        config.seed,
        device=precision.device,
        dtype=precision.inputs,
        channels_last=config.channels_last,
        on_device=task.on_device,
    )


def call(task: Task, what: str, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function of the task. An error becomes a refusal in one line that names the place."""
    with refusing(task, what):
        return function(*arguments)


@contextlib.contextmanager
def refusing(task: Task, what: str = "") -> Iterator[None]:
    """Context manager that turns an error of the task's code into a refusal, with the line that `train launch` prints.

    Args:
        what: the part of the task that runs, where the line is to name it.

    Raises:
        Refused: the task's code raised, or returned something wrong.
    """
    try:
        with doing.now(what) if what else contextlib.nullcontext(), reads.noting():
            yield
    except Refused:
        raise
    except Exception as error:
        has_reason = isinstance(error, TrainingFailed)
        reason = error if has_reason else determinism.refusal(error) or where(error, task.file)
        raise Refused(f"{what} failed: {reason}" if what else reason) from error


def plan_of(config: Config, length: int) -> Plan:
    """Return how an epoch of this many samples is cut into batches.

    Args:
        length: Number of samples of the training set, or of the order that its task gives.

    Raises:
        Refused: drop_last would leave no batch, or overfit wants more samples than there are.
    """
    assert isinstance(config.micro_batch_size, int)
    part_of, length = length, config.overfit or length
    if length > part_of:
        raise Refused(f"--overfit {length} is too large: the training set has {part_of} samples; give at most these")
    if config.data.drop_last and length < config.batch_size:
        raise Refused(
            f"--data.drop_last true leaves nothing to train on: an epoch has {length} samples, fewer than "
            f"--batch_size {config.batch_size}; lower it, or leave out --data.drop_last"
        )
    return Plan(
        length=length,
        batch_size=config.batch_size,
        micro_batch_size=config.micro_batch_size,
        seed=config.seed,
        drop_last=config.data.drop_last,
        is_even=True,
        part_of=part_of,
    )


def evaluation_plans(config: Config, eval_sets: Mapping[str, Any]) -> dict[str, Plan]:
    """Return how each evaluation set is cut, and how much of it is evaluated."""
    size, limits = config.micro_batch_size, (config.eval.limit_batches * config.batch_size, config.overfit or 0)
    assert isinstance(size, int)
    limit = min(filter(None, limits), default=0)
    seed = config.seed if config.overfit else config.data.seed  # overfit evaluates on what it trains on
    assert seed is not None
    return {
        name: Plan(length=len(one), batch_size=config.batch_size, micro_batch_size=size, seed=seed, limit=limit)
        for name, one in eval_sets.items()
    }


def total_steps(config: Config, plan: Plan) -> int:
    """Return the number of steps of the whole run."""
    if config.steps is not None:
        return config.steps
    assert config.epochs is not None
    return max(1, round(config.epochs * plan.steps_per_epoch))

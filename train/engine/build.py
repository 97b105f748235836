"""From a task and a configuration to data sets, model and optimizer: the same on every rank and in every attempt."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from train.checkpoint.kinds import keep_types
from train.config import SPREAD, Config
from train.data.fetch import fetcher
from train.data.fingerprint import of_sets
from train.data.order import seed_of
from train.data.plan import MicroBatch, Plan
from train.data.seeding import seed_host
from train.data.to_device import prepared
from train.errors import Refused, one_line
from train.parallel.precision import Precision
from train.parallel.torch_private import buffers_of
from train.tasks import Task, where

T = TypeVar("T")


def make_datasets(task: Task, config: Config) -> tuple[Any, Any]:
    """The training set and the evaluation set (or None). Seeded, so that a random split is the same everywhere.

    Raises:
        Refused: the task cannot make them, or they are no map-style data sets.
    """
    seed_host(seed_of(config.seed, "datasets"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # other numbers of threads sum in other orders, and a resume compares the bytes
    try:
        made = _call(task, "datasets", config)
    finally:
        torch.set_num_threads(threads)
    if not isinstance(made, (tuple, list)) or len(made) != 2:
        raise Refused(f"datasets in {task.file} must return (train, evaluation or None), got {type(made).__name__}")
    for part, dataset in zip(("training", "evaluation"), made, strict=True):
        if dataset is None and part == "evaluation":
            continue
        by_index = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        if not by_index or isinstance(dataset, IterableDataset):  # the latter inherits a __getitem__ that only raises
            raise Refused(
                f"the {part} set of {task.file} is a {type(dataset).__name__}; a map-style data set is needed, "
                f"with __len__ and __getitem__{_instead_of(dataset)}"
            )
        if _call_on(task, f"len() of the {part} set", len, dataset) == 0:
            raise Refused(f"the {part} set of {task.file} is empty; check --data.root and the task's settings")
    return made[0], made[1]


def _instead_of(dataset: Any) -> str:
    """What to do instead, as the end of a sentence."""
    if isinstance(dataset, DataLoader):
        return ": return its data set itself, for batches and workers are --batch_size and --data.workers"
    return ": of what can only be read in turn, make a list once, or an index of where each sample begins"


def fingerprint(task: Task, config: Config, train_set: Any, eval_set: Any) -> dict[str, Any]:
    """What the data of a run are: what the task says of them, or what can be seen in its data sets.

    Raises:
        Refused: the task's own fingerprint() fails, or returns what JSON cannot hold.
    """
    own = _call(task, "fingerprint", config) if task.fingerprint is not None else None
    if own is not None:
        _call_on(task, "fingerprint()", json.dumps, own)
    return _call_on(task, "a look at the data sets", of_sets, config.data.root, own, train_set, eval_set)


def make_model(task: Task, config: Config, weights: torch.dtype = torch.float32) -> nn.Module:
    """The model with its first weights, on the CPU. Seeded.

    Raises:
        Refused: the task cannot make it.
    """
    seed_host(seed_of(config.seed, "model"))
    model = _call(task, "model", config)
    if not isinstance(model, nn.Module):
        raise Refused(f"model in {task.file} must return a torch.nn.Module, got {type(model).__name__}")
    if any(name.rpartition(".")[2] == "_orig_mod" for name, _ in model.named_modules()):
        raise Refused(
            f"the model of {task.file} is wrapped by torch.compile, under whose names no weights fit: use "
            "--compile true, or compile a module of your own class in place (net.compile())"
        )
    if any(map(nn.parameter.is_lazy, model.parameters())):
        raise Refused(
            f"the model of {task.file} has parameters without a shape yet (torch.nn.Lazy…): give their sizes, or call "
            "the model once in model()"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise Refused(f"the model of {task.file} has no parameter to train")
    _give_memory(model)
    # not to(weights), which would make real numbers of complex ones
    return model.double() if weights == torch.float64 else model


def check_forward(task: Task, model: nn.Module) -> None:
    """Whether a forward leaves the weights alone, as far as can be told without one.

    Raises:
        Refused: it does not.
    """
    for name, part in model.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None:
            raise Refused(
                f"{name or 'the model'} in {task.file} has max_norm, with which each rank changes the weights by "
                "itself; leave it out, or shorten rows after the optimizer's step (register_step_post_hook)"
            )


def _give_memory(model: nn.Module) -> None:
    """Let each element of a buffer have a place of its own: into what expand() made nothing can be written."""
    for part in model.modules():
        for name, buffer in buffers_of(part).items():
            if buffer is not None and buffer.layout == torch.strided:
                shape = zip(buffer.stride(), buffer.shape, strict=True)
                if any(step == 0 and size > 1 for step, size in shape):
                    buffers_of(part)[name] = buffer.contiguous()


def first_samples(task: Task, config: Config, precision: Precision, train_set: Any) -> Any:
    """A micro batch of the first samples of the training set (again from the first where it is too small)."""
    assert isinstance(config.micro_batch_size, int)
    fetch, wanted = fetcher(train_set, task.collate), config.micro_batch_size

    def is_readable(index: int) -> bool:
        with contextlib.suppress(Exception):
            fetch(MicroBatch(0, 0, np.array([index]), config.seed))
            return True
        return False

    found: Iterable[int] = range(len(train_set))
    if config.data.leaves_out:
        found = list(itertools.islice(filter(is_readable, found), wanted)) or found
    indices = np.resize(np.array(list(itertools.islice(found, wanted))), wanted)
    batch = fetch(MicroBatch(0, 0, indices, config.seed))
    return prepared(batch, config.seed, precision.device, precision.inputs, config.channels_last, task.on_device)


def make_optimizer(task: Task, model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """The task's own optimizer, or the one that config.optim describes."""
    if task.optimizer is not None:
        optimizer = _call(task, "optimizer", model, config)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise Refused(
                f"optimizer in {task.file} must return a torch.optim.Optimizer, got {type(optimizer).__name__}; for "
                "parts of a model at rates of their own give one optimizer several groups of parameters"
            )
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise Refused(
                f"optimizer in {task.file} returns a {type(optimizer).__name__}, which computes the loss several times "
                "in a step, and here a step computes it once; use another optimizer"
            )
        _check_groups(optimizer, model, task)
        _check_spread(optimizer, config)
        # a checkpoint names groups by their parameters: one without any could not be read back
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        return keep_types(optimizer)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optim = config.optim
    common: dict[str, Any] = {"lr": optim.lr, "weight_decay": optim.weight_decay}
    if parameters[0].device.type == "cuda" and _takes_fused(parameters, config):
        common["fused"] = True  # False would keep torch from its second best, one kernel for several
    if optim.name == "sgd":
        made = torch.optim.SGD(parameters, momentum=optim.momentum, **common)
        if config.precision == "fp16" and optim.momentum:
            # a first step that fp16 leaves out would make buffers, and leave them unwritten (torch 2.7, fused)
            for parameter in parameters:
                made.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return made
    kind = torch.optim.AdamW if optim.name == "adamw" else torch.optim.Adam
    return kind(parameters, betas=(optim.momentum, 0.999), **common)


def _takes_fused(parameters: list[nn.Parameter], config: Config) -> bool:
    """Whether one kernel can make the step of all parameters (torch 2.7): it knows no complex ones, and SGD's none
    that are spread over ranks."""
    is_spread = config.optim.name == "sgd" and config.parallel.strategy in SPREAD
    return not is_spread and all(parameter.is_floating_point() for parameter in parameters)


def _check_groups(optimizer: torch.optim.Optimizer, model: nn.Module, task: Task) -> None:
    """Whether what an optimizer of the task's own updates belongs to the model, at rates that a schedule can follow.

    Raises:
        Refused: it does not.
    """
    own = set(map(id, model.parameters()))
    for group in optimizer.param_groups:
        if any(id(parameter) not in own for parameter in group["params"]):
            raise Refused(
                f"optimizer in {task.file} updates parameters that are not the model's: no checkpoint would hold them, "
                "and ranks would not agree on them; make them a part of what model() returns"
            )
        if not isinstance(group.get("lr"), (int, float, Tensor)):
            raise Refused(
                f"optimizer in {task.file} has a group with lr {group.get('lr')!r}; give it a number, which --schedule "
                "then changes"
            )


def _check_spread(optimizer: torch.optim.Optimizer, config: Config) -> None:
    """An optimizer must see whole parameters if its step is not made element by element; with fsdp it sees parts.

    Raises:
        Refused: one of torch's that would make another step, or none.
    """
    name = config.parallel.strategy
    if name in SPREAD and type(optimizer).__name__ in ("Adafactor", "Rprop"):
        raise Refused(
            f"torch.optim.{type(optimizer).__name__} needs whole parameters, and --parallel.strategy {name} spreads "
            "them over ranks; use --parallel.strategy ddp, or another optimizer"
        )


def _call(task: Task, function: str, *arguments: Any) -> Any:
    return _call_on(task, f"{function}()", getattr(task, function), *arguments)


def _call_on(task: Task, what: str, function: Callable[..., T], *arguments: Any) -> T:
    try:
        return function(*arguments)
    except Refused:
        raise
    except Exception as error:
        raise Refused(f"{what} failed: {where(error, task.file)}") from error


def read_weights(path: Path) -> dict[str, Tensor]:
    """Exported weights.

    Raises:
        Refused: the file is missing, or neither .safetensors nor .pt.
    """
    if not path.is_file():
        raise Refused(f"--init {path}: there is no such file")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        if path.suffix in (".pt", ".pth"):
            state = torch.load(path, map_location="cpu", weights_only=True)
            if isinstance(state, dict) and all(isinstance(value, Tensor) for value in state.values()):
                return state
            raise Refused(f"--init {path}: holds no plain dict of tensors; write one with train export")
    except Refused:
        raise
    except Exception as error:
        why = one_line(error) if path.suffix == ".safetensors" else "it is damaged, or holds more than tensors"
        raise Refused(f"--init {path}: cannot be read: {why[:200]}; write one with train export") from None
    raise Refused(f"--init {path}: must end in .safetensors or .pt")


def set_weights(model: nn.Module, state: dict[str, Tensor], source: object) -> None:
    """Load exported weights, every one of them; also under the names that DDP or torch.compile give them.

    Raises:
        Refused: names or shapes differ from the model's.
    """
    own = model.state_dict()
    while state and not own.keys() & state.keys() and (prefix := _prefix(state)):
        state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    for name in sorted(own.keys() ^ state.keys()):
        raise Refused(f"--init {source}: {name} is {'missing in the file' if name in own else 'not in the model'}")
    for name, tensor in state.items():
        if own[name].shape != tensor.shape:
            raise Refused(
                f"--init {source}: {name} has shape {tuple(tensor.shape)}, the model's {tuple(own[name].shape)}"
            )
    model.load_state_dict(state)


def _prefix(state: dict[str, Tensor]) -> str:
    """What a wrapper puts before every name, or ''."""
    return next((p for p in ("module.", "_orig_mod.") if all(name.startswith(p) for name in state)), "")


def plan_of(config: Config, length: int) -> Plan:
    """How the training set is cut.

    Raises:
        Refused: it has not even one whole batch, and a short one is to be left out.
    """
    assert isinstance(config.micro_batch_size, int)
    if config.data.drop_last and length < config.batch_size:
        raise Refused(
            f"--data.drop_last true leaves nothing to train on: the training set has {length} samples, fewer than "
            f"--batch_size {config.batch_size}; lower it, or leave out --data.drop_last"
        )
    return Plan(length, config.batch_size, config.micro_batch_size, config.seed, config.data.drop_last)


def evaluation_plan(config: Config, length: int) -> Plan:
    """How the evaluation set is cut, and how much of it is evaluated."""
    assert isinstance(config.micro_batch_size, int)
    limit = config.eval.limit_batches * config.batch_size
    return Plan(length, config.batch_size, config.micro_batch_size, config.seed, limit=limit)


def total_steps(config: Config, plan: Plan) -> int:
    """Optimizer updates of the whole run."""
    if config.steps is not None:
        return config.steps
    assert config.epochs is not None
    return max(1, round(config.epochs * plan.steps_per_epoch))

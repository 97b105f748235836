"""The optimizer of a run: the task's own, checked, or the one that config.optim describes."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .. import config as configuration
from ..config import Config, Optim, strategies
from ..config.schema import SESSION_CAN
from ..errors import Refused, nearest, one_line
from ..tasks import Task
from .objects import call
from .param_groups import groups_of

_FUSED = ("sgd", "adam", "adamw")
"""Optimizers that have one kernel for all parameters on a GPU."""
_NOT_TAKEN = {"params", "lr", "weight_decay", "differentiable"}
"""Arguments of torch's optimizers that optim.args does not take."""


def make_optimizer(task: Task, model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """Return the task's own optimizer, or the one that config.optim describes."""
    if task.optimizer is not None:
        optimizer = call(task, "optimizer()", task.optimizer, model, config)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise Refused(
                f"optimizer in {task.file} must return a torch.optim.Optimizer, got {type(optimizer).__name__}; "
                "for several learning rates, give one optimizer several groups of parameters"
            )
        check_optimizer(optimizer, model, task, config)
        return keep_dtypes(optimizer)
    return keep_dtypes(_described(task, model, config))


def _described(task: Task, model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """Return the optimizer of config.optim."""
    optim = config.optim
    kind = next(one for name, one in vars(torch.optim).items() if isinstance(one, type) and name.lower() == optim.name)
    known = {name: one.default for name, one in inspect.signature(kind).parameters.items()}
    common, groups = _arguments(optim, known), groups_of(task, model, config, known)
    parameters = [parameter for group in groups for parameter in group["params"]]
    if parameters[0].device.type == "cuda" and takes_fused(parameters, config):
        common["fused"] = True  # False would keep torch from its second best, one kernel for several
    try:
        made: torch.optim.Optimizer = kind(groups, **common)
    except (ValueError, TypeError, RuntimeError) as error:
        raise Refused(f"--optim.name {optim.name}: {one_line(error)[:300]}; see --optim.args") from None
    _check_sharded(made, config)
    if config.precision == "fp16" and optim.name == "sgd":
        # a first step that fp16 leaves out would make buffers, and leave them unwritten (torch 2.7, fused)
        for group in made.param_groups:
            for parameter in group["params"] if group["momentum"] else ():
                made.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return made


def _arguments(optim: Optim, known: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of one of torch's optimizers, without its parameters.

    Args:
        known: the arguments that it takes, with their defaults.

    Raises:
        Refused: it takes no such argument, or one of another kind.
    """
    given = {name: value for name, value in optim.args.items() if value is not None}
    for name, value in given.items():
        if name in ("lr", "weight_decay"):
            raise Refused(f"--optim.args.{name} has its own field; use --optim.{name}")
        if name not in known or name in _NOT_TAKEN:
            there = nearest(name, known, otherwise=f"; there are {', '.join(sorted(known.keys() - _NOT_TAKEN))}")
            raise Refused(f"--optim.args.{name}: {optim.name} takes no such argument{there}")
        given[name] = _like(value, known[name], name)
    _check_momentum(optim, known)
    if optim.weight_decay and "weight_decay" not in known:
        raise Refused(f"{optim.name} has no weight decay; give --optim.weight_decay 0")
    common: dict[str, Any] = {"lr": optim.lr}
    if "weight_decay" in known:
        common["weight_decay"] = optim.weight_decay
    if optim.name == "sgd":
        common["momentum"] = optim.momentum
    return common | given


def _check_momentum(optim: Optim, known: dict[str, Any]) -> None:
    """Check that optim.momentum says the momentum of sgd. Raises Refused: it does not."""
    is_sgd = optim.name == "sgd" and "momentum" not in optim.args
    is_default = optim.momentum == configuration.fields()["optim.momentum"].default
    if is_default or is_sgd:
        return
    way = f"use --optim.args.betas '[{optim.momentum}, 0.999]'" if "betas" in known else "use --optim.args"
    raise Refused(f"--optim.momentum {optim.momentum} has no effect on {optim.name} here; leave it out, or {way}")


def _like(value: Any, default: Any, name: str) -> Any:
    """Return an argument as torch takes it, with numbers in tuples.

    Raises:
        Refused: it is of another kind than the default.
    """
    if isinstance(default, tuple):
        is_like, wanted = isinstance(value, list) and len(value) == len(default), f"a list of {len(default)} numbers"
    elif default is None or isinstance(default, bool):
        is_like, wanted = isinstance(value, bool), "true or false"
    else:
        is_like, wanted = type(value) is float, "a number"
    if not is_like:
        raise Refused(f"--optim.args.{name} {value}: must be {wanted}")
    return tuple(value) if isinstance(value, list) else value


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, task: Task, config: Config) -> None:
    """Check that the task's optimizer can train the model.

    Raises:
        Refused: it cannot.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise Refused(
            f"optimizer in {task.file} returns a {type(optimizer).__name__}, which needs the loss several times in a "
            f"step, but a step of a task computes it once; use another optimizer, or {SESSION_CAN}"
        )
    _check_groups(optimizer, model, task)
    _check_sharded(optimizer, config)
    # a checkpoint names groups by their parameters: one without any could not be read back
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    if has_modes(optimizer):
        optimizer.train()  # type: ignore[attr-defined]


def has_modes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer trains other weights than it evaluates, as schedule-free ones do."""
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


@contextlib.contextmanager
def evaluated_weights(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context manager that swaps in the weights to evaluate, if an optimizer has train() and eval(), and restores the
    training weights on exit. They are copied: switching back and forth changes bits, and a resume does not repeat
    evaluations.
    """
    if not has_modes(optimizer):
        yield
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    trained = [parameter.detach().clone() for parameter in parameters]
    optimizer.eval()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        optimizer.train()  # type: ignore[attr-defined]
        with torch.no_grad():
            for parameter, value in zip(parameters, trained, strict=True):
                parameter.copy_(value)


def takes_fused(parameters: list[nn.Parameter], config: Config) -> bool:
    """Whether one kernel can update all parameters (torch 2.7). It takes no complex parameters, and SGD's takes none
    that are spread over ranks."""
    optim = config.optim
    if optim.name not in _FUSED or {"fused", "foreach"} & optim.args.keys():
        return False
    takes_no_parts = optim.name == "sgd" and strategies.of(config.parallel.strategy).splits_parameters
    return not takes_no_parts and all(parameter.is_floating_point() for parameter in parameters)


def _check_groups(optimizer: torch.optim.Optimizer, model: nn.Module, task: Task) -> None:
    """Check that the task's optimizer updates only the model's parameters, at rates that a schedule can change.

    Raises:
        Refused: it does not.
    """
    own = set(map(id, model.parameters()))
    for group in optimizer.param_groups:
        if any(id(parameter) not in own for parameter in group["params"]):
            raise Refused(
                f"optimizer in {task.file} updates parameters that are not the model's, so no checkpoint would "
                "hold them; make them part of what model() returns"
            )
        if not isinstance(group.get("lr"), (int, float, Tensor)):
            raise Refused(
                f"optimizer in {task.file} has a group with lr {group.get('lr')!r}; give it a number, which --schedule "
                "then changes"
            )


def _check_sharded(optimizer: torch.optim.Optimizer, config: Config) -> None:
    """Check an optimizer for fsdp: if its step is not element by element, it must see whole parameters, but fsdp shows
    it parts.

    Raises:
        Refused: one of torch's that would then make a wrong step or none.
    """
    name = config.parallel.strategy
    if strategies.of(name).splits_parameters and type(optimizer).__name__ in ("Adafactor", "Rprop"):
        raise Refused(
            f"torch.optim.{type(optimizer).__name__} needs whole parameters, but --parallel.strategy {name} "
            "spreads them over ranks; use --parallel.strategy ddp, or another optimizer"
        )


def keep_dtypes(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Make this optimizer load its state with the dtypes that it was saved with.

    torch gives every tensor of a state the dtype of its parameter, so that NAdam's products, or moments of fp32 over
    weights of bf16, would continue with other bits.
    """
    saved: list[dict[str, torch.dtype]] = []

    def note(_: Any, state: dict[str, Any]) -> None:
        names = [name for group in state["param_groups"] for name in group["params"]]
        values = [state["state"].get(name, {}) for name in names]
        saved[:] = [{key: t.dtype for key, t in found.items() if isinstance(t, Tensor)} for found in values]

    def restore(_: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for parameter, dtypes in zip(parameters, saved, strict=True):
            own = optimizer.state.get(parameter, {})
            own.update({key: own[key].to(dtype) for key, dtype in dtypes.items() if own[key].dtype != dtype})

    optimizer.register_load_state_dict_pre_hook(note)
    optimizer.register_load_state_dict_post_hook(restore)
    return optimizer

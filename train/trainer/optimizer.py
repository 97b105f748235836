"""The optimizer of a run: the task's own, checked, or the one that config.optim describes; and its learning rate.

The rate is a function of the step, so nothing of it is saved.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn

from train.config import SPREAD, Config
from train.errors import Refused
from train.tasks import Task
from train.trainer.build import call


def make_optimizer(task: Task, model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """The task's own optimizer, or the one that config.optim describes."""
    if task.optimizer is not None:
        optimizer = call(task, "optimizer()", task.optimizer, model, config)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise Refused(
                f"optimizer in {task.file} must return a torch.optim.Optimizer, got {type(optimizer).__name__}; for "
                "parts of a model at rates of their own give one optimizer several groups of parameters"
            )
        check_optimizer(optimizer, model, task, config)
        return keep_dtypes(optimizer)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optim = config.optim
    common: dict[str, Any] = {"lr": optim.lr, "weight_decay": optim.weight_decay}
    if parameters[0].device.type == "cuda" and takes_fused(parameters, config):
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


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, task: Task, config: Config) -> None:
    """Whether an optimizer of the task's own can train the model.

    Raises:
        Refused: it cannot.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise Refused(
            f"optimizer in {task.file} returns a {type(optimizer).__name__}, which computes the loss several times "
            "in a step, and here a step computes it once; use another optimizer"
        )
    _check_groups(optimizer, model, task)
    _check_sharded(optimizer, config)
    # a checkpoint names groups by their parameters: one without any could not be read back
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]


def takes_fused(parameters: list[nn.Parameter], config: Config) -> bool:
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


def _check_sharded(optimizer: torch.optim.Optimizer, config: Config) -> None:
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


def keep_dtypes(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Let what this optimizer loads have the dtypes that it was saved with.

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


def rate_scale(config: Config) -> float:
    """The factor between optim.lr and the peak learning rate.

    linear: batch_size / base_batch_size (Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 2.1);
    sqrt: its square root (Krizhevsky, "One weird trick", 2014, section 5).
    """
    ratio = config.batch_size / config.schedule.base_batch_size
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[config.schedule.scaling]


def rate_factor(config: Config, step: int, steps_per_epoch: int, total_steps: int) -> float:
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

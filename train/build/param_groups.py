"""Groups of parameters for the optimizer that config.optim describes: the task's own, or by layer and kind."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from ..config import Config
from ..errors import Refused, nearest
from ..tasks import Task
from .objects import call

Groups = list[dict[str, Any]]
_NORMS = (nn.LayerNorm, nn.RMSNorm)
"""Normalisation layers whose weights may have several dimensions; the weights of other ones are vectors."""
_OF_GROUPS = ("params", "lr", "lr_scale", "weight_decay")


def groups_of(task: Task, model: nn.Module, config: Config, options: Collection[str]) -> Groups:
    """Return groups of all trained parameters, each with its rate before the schedule.

    Args:
        options: the keys that the optimizer takes for a group beside rate and weight decay.

    Raises:
        Refused: those of the task's own param_groups() are no groups, hold a parameter twice or leave one out.
    """
    if task.param_groups is not None:
        return _own(task, model, config, options)
    optim = config.optim
    scales = layer_scales(model, optim.layer_decay) if optim.layer_decay < 1 else {}
    own = ((part, p) for part in model.modules() for p in part.parameters(recurse=False))
    plain = {id(p) for part, p in own if optim.no_decay and (p.ndim <= 1 or isinstance(part, _NORMS))}
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups.setdefault((scales.get(id(parameter), 1.0), id(parameter) not in plain), []).append(parameter)
    return [
        {"params": groups[key], "lr": optim.lr * key[0]} | ({} if key[1] else {"weight_decay": 0.0})
        for key in sorted(groups, reverse=True)  # the peak rate first: it is the one that is logged
    ]


def layer_scales(model: nn.Module, decay: float) -> dict[int, float]:
    """Return a map from a parameter's identity to decay^(L - i) for layer i of L (Clark et al., "ELECTRA", 2020).

    Layers are the model's children with parameters, in order. In place of a Sequential or ModuleList stand its
    children, and so in place of a child that holds the longest of these; other lists inside a list are one layer. What
    such a parent has itself is of the next layer.

    Raises:
        Refused: the model has one layer only.
    """
    lists = [part for part in model.modules() if isinstance(part, (nn.Sequential, nn.ModuleList))]
    longest = max(lists, key=len, default=None)
    depth: dict[int, int] = {}  # a tied parameter is of its first layer
    layers = 0
    left: list[tuple[nn.Module, nn.Module | None]] = [(model, None)]
    while left:
        part, parent = left.pop()
        is_list = part in lists and parent not in lists
        is_opened = part is model or is_list or any(inner is longest for inner in part.modules())
        new = {id(p): layers for p in part.parameters(recurse=not is_opened) if id(p) not in depth}
        depth |= new
        if is_opened:
            left += [(child, part) for child in reversed([*part.children()])]
        elif new:
            layers += 1
    if layers < 2:
        raise Refused("--optim.layer_decay: the model has one layer only; leave it out, or define param_groups()")
    return {parameter: decay ** max(layers - 1 - layer, 0) for parameter, layer in depth.items()}


def _own(task: Task, model: nn.Module, config: Config, options: Collection[str]) -> Groups:
    assert task.param_groups is not None
    what = f"param_groups in {task.file}"
    made = call(task, "param_groups()", task.param_groups, model, config)
    if not isinstance(made, (list, tuple)) or not all(isinstance(one, dict) and "params" in one for one in made):
        raise Refused(f'{what} must return a list of dicts, each with its parameters as "params"')
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    left, groups = dict(names), []
    for group in made:
        _check_options(group, options, what)
        given = [group["params"]] if isinstance(group["params"], Tensor) else call(task, what, list, group["params"])
        parameters = [one[-1] if isinstance(one, tuple) and one else one for one in given]
        for parameter in parameters:
            if id(parameter) not in names:
                raise Refused(f"{what} has something that is no parameter of the model; take parameters of `model`")
            if left.pop(id(parameter), None) is None:
                raise Refused(f"{what} names {names[id(parameter)]} twice; leave it in one group")
        rate = group.get("lr", config.optim.lr) * group.get("lr_scale", 1.0)
        rest = {key: value for key, value in group.items() if key not in ("params", "lr", "lr_scale")}
        parameters = [parameter for parameter in parameters if parameter.requires_grad]
        if parameters:  # a checkpoint names groups by their parameters
            groups.append({"params": parameters, "lr": rate} | rest)
    for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
        if id(parameter) in left:
            name = left[id(parameter)]
            raise Refused(f"{what} leaves out {name}; put it into a group, or do not train it: --freeze {name}")
    return groups


def _check_options(group: dict[str, Any], options: Collection[str], what: str) -> None:
    for key, value in group.items():
        known = [*_OF_GROUPS, *options]
        if key not in known:
            raise Refused(f"{what}: unknown key {key!r}{nearest(str(key), known, otherwise='; see docs/tasks.md')}")
        if key in _OF_GROUPS[1:] and not (isinstance(value, (int, float)) and 0 <= value < math.inf):
            raise Refused(f"{what}: {key} is {value!r}; give a finite number that is not negative")

"""The modules of a model that are gathered (fsdp) or computed again (activation checkpointing) as a whole."""

from __future__ import annotations

import collections
import functools
from typing import Any

from torch import nn

from ..config import Config
from ..errors import Refused
from .torch_private import Norm

_UNITS = 32
"""With `wrap auto` a unit has at least one part in this many of all parameters, so that messages are neither many and
small nor one that holds the whole model."""
_LEAST = 100_000
"""Minimum number of parameters of a unit with `wrap auto`."""
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Containers: their forward is never called, and a unit's parameters are gathered by its forward."""


def wrapped(model: nn.Module, config: Config) -> list[nn.Module]:
    """Return the modules that fsdp gathers as a whole, inner ones before outer ones. With `compile blocks` they are
    also what is compiled, so that no graph contains a gathering.

    Raises:
        Refused: the model has no such modules.
    """
    if config.compile == "blocks" and config.parallel.wrap == "auto":
        return _blocks(model)
    return units(model, config.parallel.wrap, "wrap")


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model, without blocks inside blocks: modules with parts of their own that share
    their class with another one in the same container."""
    owners, found = _owners(model), list[nn.Module]()

    def visit(module: nn.Module) -> None:
        children = list(module) if isinstance(module, (nn.ModuleList, nn.Sequential)) else []
        kinds = collections.Counter(type(child) for child in children)
        for child in module.children():
            is_block = kinds[type(child)] > 1 and any(True for _ in child.children())
            if is_block and not isinstance(child, (*_NEVER_CALLED, nn.Sequential)) and _is_closed(child, owners):
                if child not in found:
                    found.append(child)
            else:
                visit(child)

    visit(model)
    if not found:
        raise Refused(
            "--compile blocks: the model has no repeated blocks (modules of one class in a ModuleList or Sequential); "
            "name classes with --parallel.wrap, or use --compile true"
        )
    return found


def units(model: nn.Module, chosen: str, field: str) -> list[nn.Module]:
    """Return the modules inside `model` that are treated as a whole, inner ones before outer ones.

    Args:
        chosen: class names with commas, or `auto`: modules that have at least 1/32 of all parameters (and 100,000) that
            are in no smaller unit.
        field: of `parallel`, for messages.

    Raises:
        Refused: the model has no module of such a class.
    """
    owners = _owners(model)
    if chosen != "auto":
        names = [name.strip() for name in chosen.split(",") if name.strip()]
        if not names:
            raise Refused(f"--parallel.{field} {chosen}: names no class; use auto, or names of classes with commas")
        known = sorted({type(module).__name__ for module in model.modules() if module is not model})
        for name in names:
            if name not in known:
                raise Refused(
                    f"--parallel.{field} {name}: the model has no module of that class; it has {', '.join(known)}"
                )
        found = [module for module in model.modules() if module is not model and type(module).__name__ in names]
        for module in found:
            if isinstance(module, _NEVER_CALLED):
                raise Refused(
                    f"--parallel.{field} {type(module).__name__}: a container is never called; name what is in it"
                )
        return [module for module in reversed(found) if _is_closed(module, owners)]
    total = sum(parameter.numel() for parameter in model.parameters())
    least = max(_LEAST, total // _UNITS)
    large: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        """Find the units inside this module. Returns how many of its parameters are in no unit."""
        left = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        if not isinstance(module, nn.MultiheadAttention):  # it reads its parts' weights without calling them
            left += sum(visit(child) for child in module.children())
        else:
            left = sum(parameter.numel() for parameter in module.parameters())
        if module is model or left < least or isinstance(module, _NEVER_CALLED) or not _is_closed(module, owners):
            return left
        large.append(module)
        return 0

    visit(model)
    return large


def norms(model: nn.Module) -> list[nn.Module]:
    """Return torch's batch and instance norms that have weights of their own."""
    owners = _owners(model)
    found = [module for module in model.modules() if isinstance(module, Norm) and module.affine]
    return [module for module in found if _is_closed(module, owners)]


def _owners(model: nn.Module) -> dict[int, set[int]]:
    """Return a map from a parameter's identity to the identities of the modules that hold it directly: tied weights
    have several."""
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))
    return owners


def _is_closed(module: nn.Module, owners: dict[int, set[int]]) -> bool:
    """Whether no parameter of this module is tied to one outside: such parameters belong to a common unit."""
    inside = {id(part) for part in module.modules()}
    return all(owners[id(parameter)] <= inside for parameter in module.parameters())


def recompute(model: nn.Module, chosen: str) -> None:
    """Set up activation checkpointing: the insides of these modules are computed again in the backward pass.

    Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016. Random states are those of the first time, so
    the result has the same bits. Names of parameters do not change.

    Args:
        chosen: as in `units`; '': none.

    Raises:
        Refused: the model has no module of such a class, or one has running statistics: they would count twice.
    """
    if not chosen:
        return
    for module in units(model, chosen, "recompute"):
        statistics = [part for part in module.modules() if getattr(part, "track_running_stats", False)]
        if statistics and chosen == "auto":
            continue
        if statistics:
            raise Refused(
                f"--parallel.recompute {type(module).__name__}: it has a {type(statistics[0]).__name__}, whose "
                "running statistics would count every batch twice; name other classes"
            )
        module.forward = functools.partial(_again, module.forward)


def _again(forward: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import checkpoint  # two seconds, which a launch without it need not take

    return checkpoint(forward, *args, use_reentrant=False, **kwargs)

"""Parameters that are not trained: `freeze`, patterns of names."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn

from ..errors import Refused, nearest


def freeze(model: nn.Module, patterns: str) -> None:
    """Freeze the parameters that these patterns name.

    Raises:
        Refused: a pattern matches nothing, or all that could be trained.
    """
    wanted = patterns_of(patterns)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    known = [*parameters, *filter(None, dict(model.named_modules()))]
    for pattern in wanted:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise Refused(
                f"--freeze {pattern}: the model has no parameter or module of that name"
                + nearest(pattern, known, otherwise=f"; it has {', '.join(name for name, _ in model.named_children())}")
            )
    for name, parameter in parameters.items():
        if matches(name, wanted):
            parameter.requires_grad_(False)
    if wanted and not any(parameter.requires_grad for parameter in parameters.values()):
        raise Refused(f"--freeze {patterns}: leaves no parameter to train; name fewer")


def frozen_names(model: nn.Module, patterns: str) -> set[str]:
    """Return the names in the state of a new model that training leaves alone: parameters without gradients, and the
    buffers that these patterns match."""
    wanted = patterns_of(patterns)
    names = {name for name, one in model.named_parameters(remove_duplicate=False) if not one.requires_grad}
    if wanted:
        names |= {name for name, _ in model.named_buffers(remove_duplicate=False) if matches(name, wanted)}
    return names & model.state_dict().keys()


def set_training(model: nn.Module, patterns: str) -> None:
    """Put a model into training mode, and its fully frozen modules into eval mode: they keep their running statistics
    and drop nothing."""
    model.train()
    wanted = patterns_of(patterns)
    for name, module in model.named_modules() if wanted else ():
        own = [inner for inner, _ in module.named_parameters(name)]
        if matches(name, wanted) or (own and all(matches(one, wanted) for one in own)):
            module.eval()


def patterns_of(patterns: str) -> list[str]:
    """Return the patterns of a field, which commas separate."""
    return [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]


def matches(name: str, patterns: list[str]) -> bool:
    """Whether a pattern matches the dotted name or the name of a module that contains it."""
    parts = name.split(".")
    names = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(fnmatchcase(one, pattern) for one in names for pattern in patterns)

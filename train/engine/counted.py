"""Numbers that a model keeps as plain attributes: no checkpoint holds them, and a resume begins with the first ones.

Unless a module tells them as its extra state (`get_extra_state`), which is a part of the model's.
"""

from __future__ import annotations

from torch import nn

Numbers = dict[str, int | float]


def numbers(model: nn.Module) -> Numbers:
    """The numbers among the attributes of a model and its parts, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, part in model.named_modules()
        if type(part).get_extra_state is nn.Module.get_extra_state
        for name, value in vars(part).items()
        if type(value) in (int, float)
    }


def warning(before: Numbers, after: Numbers) -> str:
    """What is said of those that a step has changed; '' where it has changed none."""
    changed = [name for name, value in after.items() if name in before and before[name] != value]
    if not changed:
        return ""
    return (
        f"warning: the model counts in {changed[0]}, a plain attribute, which no checkpoint holds: after a resume or a "
        "death it begins anew; make it a buffer (register_buffer)"
    )

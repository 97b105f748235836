"""What a task's own model() has compiled, as a whole or in part: set aside until training begins.

`torch.compile(net)` wraps a model in another one, under whose names (`_orig_mod.`) no exported weights fit. Here it is
the model itself again, which is checked, measured and exported as such, and compiled in place (as `net.compile()` does)
where it computes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

_KEPT = "_compiled_by_task"


def set_aside(model: nn.Module) -> nn.Module:
    """The same model, not compiled, under its own names."""
    found = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)  # else none can be compiled
    if found is None:
        return model
    model = _unwrapped(model, found)
    for part in model.modules():
        for name, child in part._modules.items():
            if child is not None:
                part._modules[name] = _unwrapped(child, found)
    for part in model.modules():
        if part._compiled_call_impl is not None:
            vars(part)[_KEPT], part._compiled_call_impl = part._compiled_call_impl, None
    return model


def give_back(model: nn.Module) -> None:
    """Compile again what the task has compiled."""
    for part in model.modules():
        if _KEPT in vars(part):
            part._compiled_call_impl = vars(part).pop(_KEPT)


def _unwrapped(module: nn.Module, wrapper: Any) -> nn.Module:
    while isinstance(module, wrapper):
        inner: nn.Module = module._orig_mod
        inner._compiled_call_impl = module.dynamo_ctx(_caller(inner))
        module = inner
    return module


def _caller(module: nn.Module) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:  # a frame that torch compiles: it passes over its own modules'
        return module._call_impl(*arguments, **named)

    return call

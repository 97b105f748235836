"""Backward and an optimizer's step without what torch puts around them: of a small model that is most of their cost.

torch wraps `step` of each optimizer's class (torch/optim/optimizer.py, `profile_hook_step`): it names a range for
profilers and calls the hooks that users register. Without a profiler and without hooks that is nothing but time.
`torch.autograd.backward` looks at what it is given, and makes what is missing; nothing is here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as torchs

_NAMES = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Attributes of an optimizer, dictionaries of the hooks of its step."""
_WRAP: Any = getattr(torchs.Optimizer, "profile_hook_step", None)
_CODE = _WRAP(lambda: None).__code__ if _WRAP is not None else object()
_UNKNOWN = {"": "a torch that keeps its hooks elsewhere"}
_BACKWARD: Any = getattr(torch.autograd.graph, "_engine_run_backward", None)


def backward(root: Tensor, gradient: Tensor) -> None:
    """What `torch.autograd.backward(root, gradient)` does with a scalar and one of its type and device."""
    if _BACKWARD is None:
        torch.autograd.backward(root, gradient)
    else:
        _BACKWARD((root,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def step(optimizer: torch.optim.Optimizer) -> None:
    """What `optimizer.step()` does, hooks and all."""
    whole: Any = type(optimizer).step
    # a class's step may be wrapped again by its user, who copies the marks of torch's wrapper
    bare = whole.__wrapped__ if getattr(whole, "__code__", None) is _CODE else None
    if bare is None or "step" in vars(optimizer) or _is_watched(optimizer):
        optimizer.step()
    else:
        bare(optimizer)


def _is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a profiler or a hook wants to know of the step."""
    if getattr(torch.autograd.profiler, "_is_profiler_enabled", True):
        return True
    own = vars(optimizer)
    for name in HOOKS:
        if own.get(name, _UNKNOWN):
            return True
    return any(getattr(torchs, name, _UNKNOWN) for name in _NAMES)

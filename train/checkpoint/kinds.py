"""The types of an optimizer's state, over a load. Imports no torch.distributed: a launch is checked with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def keep_types(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Let what this optimizer reads back have the types that it was saved with.

    torch gives every tensor of a state the type of its parameter, so that NAdam's products, or moments of fp32 over
    weights of bf16, would go on with other bits.
    """
    saved: list[dict[str, torch.dtype]] = []

    def note(_: Any, state: dict[str, Any]) -> None:
        names = [name for group in state["param_groups"] for name in group["params"]]
        values = [state["state"].get(name, {}) for name in names]
        saved[:] = [{key: t.dtype for key, t in found.items() if isinstance(t, Tensor)} for found in values]

    def restore(_: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for parameter, types in zip(parameters, saved, strict=True):
            own = optimizer.state.get(parameter, {})
            own.update({key: own[key].to(kind) for key, kind in types.items() if own[key].dtype != kind})

    optimizer.register_load_state_dict_pre_hook(note)
    optimizer.register_load_state_dict_post_hook(restore)
    return optimizer

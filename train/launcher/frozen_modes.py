"""Tells which frozen modules are in training mode: `requires_grad_(False)` leaves their dropout and BatchNorm on."""

from __future__ import annotations

from torch import nn

from ..build.freeze import set_training
from ..parallel.torch_private import BatchNorm, Norm
from ..tasks import Task

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_NAMED = 3
"""Maximum number of modules that the line names."""


def warnings(task: Task, model: nn.Module, freeze: str) -> list[str]:
    """Return a line about the frozen modules that compute otherwise in training than in an evaluation; [] if there are
    none. Leaves the modes of the model as they are."""
    modes = [(part, part.training) for part in model.modules()]
    set_training(model, freeze)  # a model may keep its teacher in eval mode by its own train()
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{one}.") for one in found)
        parameters = [*module.parameters()]
        if is_inside or not name or not parameters or any(one.requires_grad for one in parameters):
            continue
        if what := next(filter(None, map(_active, module.modules())), ""):
            found[name] = what
    for part, mode in modes:
        part.training = mode
    if not found:
        return []
    names, more = [*found][:_NAMED], len(found) - _NAMED
    listed = ", ".join(f"{name} ({found[name]})" for name in names) + (f" and {more} more" if more > 0 else "")
    return [
        f"frozen by model() in {task.file.name}, but in training mode: {listed}; for eval mode: "
        f"--freeze '{','.join(found)}', or .eval() in loss()"
    ]


def _active(part: nn.Module) -> str:
    """Return what a module does in training mode alone; '' if nothing."""
    if not part.training:
        return ""
    if isinstance(part, _DROPOUTS):
        return "dropout" if part.p > 0 else ""
    if isinstance(part, (nn.MultiheadAttention, nn.RNNBase)):
        return "dropout" if part.dropout > 0 else ""
    if isinstance(part, BatchNorm):
        return "BatchNorm"
    return type(part).__name__ if isinstance(part, Norm) and part.track_running_stats else ""

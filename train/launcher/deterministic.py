"""Refuses a run on GPUs that `deterministic` would end in its first step.

torch raises an error in an operator without a deterministic implementation, often only in the first backward pass. The
launch finds such an operator earlier: it computes the loss of the first samples, and the gradients, on torch's device
`meta`, which has shapes but no values.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
from torch import nn

from .. import doing
from ..build import objects
from ..build.freeze import set_training
from ..build.loss import training_loss
from ..build.updates import read_updates
from ..config import Config
from ..data.to_device import to_device
from ..errors import Refused
from ..parallel.precision import cpu_precision
from ..parallel.torch_private import noting_operators, without_compiler
from ..tasks import Task
from .case import Case

_SAMPLES = 2
"""Number of samples; BatchNorm may need more than one."""
_TORCH = "2.7."
"""Version of torch that the table is of. A newer torch may have deterministic implementations of these operators."""
_NLL_LOSS_2D = "nll_loss2d_forward"
_LACKING = {
    _NLL_LOSS_2D: "cross_entropy or nll_loss of each pixel (without reduction='none')",
    "_adaptive_avg_pool2d_backward": "AdaptiveAvgPool1d or AdaptiveAvgPool2d to more than one value",
    "_adaptive_avg_pool3d_backward": "AdaptiveAvgPool3d to more than one value",
    "adaptive_max_pool2d_backward": "AdaptiveMaxPool1d or AdaptiveMaxPool2d",
    "avg_pool3d_backward": "AvgPool3d",
    "fractional_max_pool2d_backward": "FractionalMaxPool2d",
    "max_pool3d_with_indices_backward": "MaxPool3d",
    "max_unpool2d": "MaxUnpool1d or MaxUnpool2d",
    "max_unpool3d": "MaxUnpool3d",
    "reflection_pad1d_backward": "ReflectionPad1d",
    "reflection_pad3d_backward": "ReflectionPad3d",
    "upsample_bicubic2d_backward": "bicubic interpolation",
    "upsample_linear1d_backward": "linear interpolation",
    "upsample_trilinear3d_backward": "trilinear interpolation",
}
"""Maps operators for which torch raises an error on every GPU to words for them. tests/cuda compares this table with
torch; its documentation of use_deterministic_algorithms lists more than torch refuses."""


def check(case: Case) -> None:
    """Check that a new run uses no operator that it would have to refuse in its first step. The model loses its values.

    Raises:
        Refused: an operator has no deterministic implementation.
    """
    # torch.compile replaces many of these operators by its own kernels
    is_known = torch.__version__.startswith(_TORCH) and not case.config.compile
    if case.device.type != "cuda" or not case.config.deterministic or not is_known:
        return
    if lacking := _first_lacking(case.task, case.config, case.train_set, case.model):
        raise Refused(
            f"{lacking} has no deterministic implementation on a GPU; use another operation, or --deterministic false "
            "(a resume then ends with other bits)"
        )


def _first_lacking(task: Task, config: Config, train_set: object, model: nn.Module) -> str:
    """Return the first such operator of a step, in words; '' if there is none, or if the step cannot be computed so."""
    found: list[str] = []
    try:
        batch = objects.first_samples(task, config, precision=cpu_precision(config), dataset=train_set, count=_SAMPLES)
        batch = to_device(batch, torch.device("meta"))
        set_training(model.to("meta"), config.freeze)
        with doing.now("a first step"), warnings.catch_warnings(action="ignore"), without_compiler(), noting(found):
            for update in read_updates(task, model, config):
                update.activate()
                loss = training_loss(
                    update.loss, lambda function: function(model), batch=batch, samples=_SAMPLES, what=update.what
                )
                loss.value.backward()
    except Exception:  # a task that reads values, for example; the first step then tells
        pass
    return found[0] if found else ""


def noting(found: list[str]) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that adds to `found` what torch computes without a deterministic implementation."""

    def note(name: str, arguments: tuple[Any, ...]) -> None:
        is_single = name == _NLL_LOSS_2D and arguments[3:4] == (0,)  # without reduction
        if name in _LACKING and not is_single:
            found.append(_LACKING[name])

    return noting_operators(note)

"""Settings that make two processes compute the same bits, in training and in `train eval`."""

from __future__ import annotations

import os
import re

import torch
from torch import nn

from .. import causes
from ..config import Config

_WARNED = re.compile(r"(\S[^\n.]*?) (?:does not have a deterministic implementation|defaults to a non-deterministic)")
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def set_determinism(config: Config) -> None:
    """Set this process's arithmetic as the configuration says. Call it before a device is touched: cuBLAS reads it
    then.

    Deterministic is strict. With warnings alone torch would not change the backward of attention, in all three of its
    fast kernels; strict, it fixes the order in two of them and avoids the third, cuDNN's (2.7.1:
    ATen/native/transformers/cuda). An operation without a deterministic way raises; `refusal` says what to do then.
    """
    assert config.cpu_threads is not None
    torch.set_num_threads(config.cpu_threads)
    if config.deterministic:
        switch_on(warn_only=False)
    else:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = True


def switch_on(*, warn_only: bool) -> None:
    """Choose deterministic algorithms. Call it before a device is touched.

    Args:
        warn_only: an operation without a deterministic way warns; otherwise it raises.
    """
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.backends.cudnn.benchmark = False  # the fastest algorithm by trial may be another one in the next process
    if os.environ.get(_CUBLAS) != ":16:8":  # the other one of the two with which cuBLAS is deterministic
        os.environ[_CUBLAS] = ":4096:8"
    # filling every empty tensor with NaN, to find reads of it, takes a tenth of the time and changes no result
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def without_form(warning: str) -> str:
    """Return the operation that torch says not to compute in a deterministic way; '' for other warnings."""
    found = _WARNED.search(warning)
    return found[1] if found else ""


def lay_out(model: nn.Module, config: Config) -> nn.Module:
    """Lay out the model's weights in memory as the configuration says. Returns the same model."""
    if config.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def refusal(error: BaseException) -> str:
    """Return the message for an operation that torch refuses because it is not deterministic; '' for others."""
    return causes.DETERMINISM.told(str(error)) if isinstance(error, RuntimeError) else ""
